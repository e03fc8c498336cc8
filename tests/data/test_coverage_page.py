"""The coverage page holds every class, escapes hostile names and reads no file from elsewhere."""

import re

from scenes import clips, write_yolo

from kfp_gate.data import coverage
from kfp_gate.data.splitting import split_dataset


def test_two_hundred_classes_with_hostile_names(tmp_path):
    names = ["<script>alert(1)</script>", "원뿔 (소형)", "50%", 'a"b', *(f"class {i}" for i in range(196))]
    listed = "names:\n" + "".join(f"  {i}: {name!r}\n" for i, name in enumerate(names))
    root = write_yolo(tmp_path / "set", clips(20, 2), names=listed)
    result = split_dataset(str(root), min_instances=1)
    html = coverage.html(result.coverage)
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert html.count('<td class="name">') == 200 and "50%" in html and "원뿔 (소형)" in html
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", html)
    assert len(coverage.text(result.coverage).splitlines()) < 50
    assert sum(name.endswith("/test_instances") for name in coverage.metrics(result.coverage)) == 200
