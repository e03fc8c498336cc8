"""The examples of docs/registry.md and docs/preflight.md run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_gate.evaluation.model_folder import ModelCard, write_model_folder
from kfp_gate.registry.register import register_model

DOCS = Path(__file__).parents[2] / "docs"
Make = Callable[..., Path]


def example(page: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return code


def test_a_registered_model_is_a_usable_detector_in_three_lines(
    tracking_uri: str,
    make_verdict: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch
    from PIL import Image

    from kfp_gate.training.base_model import resolve
    from kfp_gate.training.untrained import write_untrained

    torch.set_num_threads(1)
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "yolo"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    classes = ("cone", "원뿔 (소형)")
    write_untrained(resolve("yolo11n.yaml:width=0.125,depth=0.33", tmp_path), classes, tmp_path / "weights.pt")
    write_model_folder(tmp_path / "made", tmp_path / "weights.pt", ModelCard("", classes, 64))
    register_model(tmp_path / "made", make_verdict(tmp_path / "made"), name="NAME")
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (80, 60), "red").save("image.png")
    found = {}
    exec(compile(example("registry.md"), "registry.md", "exec"), found)
    assert found["detector"].classes == classes
    assert capsys.readouterr().out.count("[") >= 1


def test_a_check_of_ones_own_is_a_function_of_the_request() -> None:
    from types import SimpleNamespace

    found: dict[str, Callable[..., list[object]]] = {}
    exec(compile(example("preflight.md"), "preflight.md", "exec"), found)
    assert [found["enough_images"](SimpleNamespace(batch=b))[0].level for b in (16, 65)] == ["ok", "error"]


def test_every_tag_that_the_page_names_is_one_that_is_written(
    tracking_uri: str, make_model: Make, make_verdict: Make
) -> None:
    from kfp_gate.registry.tracking import connect
    from kfp_gate.registry.versions import all_versions

    model = make_model(image="worker@sha256:0")
    register_model(model, make_verdict(model), name="det", tracking_uri=tracking_uri, run_id="r")
    (version,) = all_versions(connect(tracking_uri), "det")
    section = (DOCS / "registry.md").read_text(encoding="utf-8").split("| tag | |")[1].split("##")[0]
    named = re.findall(
        r"`([a-z0-9_.<>]+)`", "\n".join(line.split("|")[1] for line in section.splitlines() if "|" in line)
    )
    assert len(named) > 10
    for tag in named:
        pattern = re.sub(r"<\w+>", "[^.]+", tag.replace(".", r"\."))
        assert any(re.fullmatch(pattern, key) for key in version.tags), tag
