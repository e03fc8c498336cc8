"""The other pages share the gate's frame: the same promises hold for them."""

import numpy as np
import pytest

pytestmark = pytest.mark.all_only

NAMES = (
    "cone",
    "<img src=x onerror=\"window.hacked='img'\">",
    "a name of many words that does not break_at_all_in_the_middle",
)


@pytest.fixture(scope="module")
def coverage_page(tmp_path_factory):
    from PIL import Image

    from kfp_gate.data import coverage
    from kfp_gate.data.splitting import split_dataset

    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for part in ("images", "labels"):
        (folder / part).mkdir()
    names = "".join(f"  {i}: '{name}'\n" for i, name in enumerate(n.replace("'", "''") for n in NAMES))
    (folder / "data.yaml").write_text(f"train: images\nnames:\n{names}", encoding="utf-8")
    for i in range(40):
        stem = f"scene{i // 4:02}_frame_{i % 4}"
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / "images" / f"{stem}.png")
        (folder / "labels" / f"{stem}.txt").write_text(f"{i % 3} 0.5 0.5 0.25 0.25\n")
    path = folder / "coverage.html"
    path.write_text(coverage.html(split_dataset(str(folder)).coverage), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(360, True), (360, False), (1200, False)])
def test_coverage(coverage_page, page, width, dark):
    browser = page(coverage_page, width=width, dark=dark)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return window.hacked") is None
    assert NAMES[1] in browser.execute_script("return document.body.textContent")
