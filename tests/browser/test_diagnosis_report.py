"""The diagnosis in a real browser: inert, readable on a phone, its rows on one axis, gaps and unknowns to be seen."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_gate_report import CONTRAST

sys.path.append(str(Path(__file__).parents[1]))
from diagnosis.recorded import diagnosed, recorded
from diagnosis.test_report import RECORD

from kfp_gate.diagnosis.comparing.compare import compare
from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.pages import report
from kfp_gate.diagnosis.reading.runs import Run

pytestmark = pytest.mark.all_only

HOSTILE = "</title></style></script><img src=x onerror=\"window.hacked='img'\"><script>window.hacked='script'</script>"
LONG = "a_name_that_does_not_break_" * 6
WIDTHS = [(1200, False, "screen"), (360, False, "screen"), (360, True, "screen"), (800, False, "print")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("diagnoses")
    gpus = recorded(gaps=[(500, 700)], mig=(1,))
    hostile = recorded(epochs=4, name=HOSTILE, where=HOSTILE)
    alone = recorded(ranks=1, gpu=False, epochs=4, ended=False, name=LONG)
    little = Run("little", {0: [{"kind": "start", "time": "2026-01-01T00:00:00+00:00"}]})
    before, after = valued(recorded(ranks=1, epochs=6), 0.3), valued(faster(recorded(ranks=1, epochs=6)), 0.31)
    (folder / "training").mkdir()
    record = {**RECORD, "classes": [HOSTILE], "stopped": HOSTILE}
    (folder / "training/record.json").write_text(json.dumps(record))
    (folder / "training/timeline.jsonl").write_text("\n".join(map(json.dumps, hostile.ranks[0])))
    html = {
        "gpus": report.html(diagnosed(gpus), gpus),
        "judged": report.html(diagnose(gpus), gpus),
        "hostile": report.html(diagnosed(hostile, HOSTILE), hostile),
        "alone": report.html(diagnosed(alone, LONG), alone),
        "little": report.html(diagnose(little), little),
        "training": report.training_page(folder / "training"),
        "comparison": report.comparison_html(compare(before, replace(after, where=HOSTILE))),
    }
    paths = {name: folder / f"{name}.html" for name in html}
    for name, text in html.items():
        paths[name].write_text(text, encoding="utf-8")
    return paths


def faster(run: Run) -> Run:
    lines = [
        {**x, "seconds": {**x["seconds"], "data": 0.3 * x["seconds"]["data"]}} if x["kind"] == "window" else x
        for x in run.ranks[0]
    ]
    return replace(run, ranks={0: lines})


def valued(run: Run, value: float) -> Run:
    """With values of each epoch, under a name from outside."""
    values = [
        {"kind": "epoch", "time": x["time"], "epoch": x["epoch"], "losses": {HOSTILE: 1.0 / x["epoch"] + value},
         "values": {"map50_95": value + 0.01 * (-1) ** x["epoch"]}}
        for x in run.ranks[0] if x["kind"] == "phases"
    ]  # fmt: skip
    return replace(run, ranks={0: [*run.ranks[0], *values]})


@pytest.mark.parametrize(("width", "dark", "media"), WIDTHS)
def test_no_error_no_sideways_scroll_nothing_from_outside(pages, page, width, dark, media):
    for name, path in pages.items():
        browser = page(path, width=width, dark=dark, media=media)
        # What is folded is part of the page.
        browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert browser.get_log("browser") == [], name
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, name
        outside = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert [n for n in outside if not n.startswith("data:")] == [], name


def test_hostile_names_are_text(pages, page):
    for name in ("hostile", "training", "comparison"):
        browser = page(pages[name])
        assert browser.execute_script("return window.hacked") is None
        assert browser.execute_script("return document.scripts.length") == 1
        assert browser.execute_script("return document.querySelectorAll('img, [onerror], [onclick]').length") == 0
        assert HOSTILE in browser.execute_script("return document.body.textContent"), name


def test_the_answer_comes_first(pages, page):
    for width in (360, 1200):
        browser = page(pages["judged"], width=width)
        assert browser.execute_script("return document.querySelector('h1').getBoundingClientRect().top") < 120
    titles = browser.execute_script("return [...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert titles == [
        "Why, and what to check next", "What a change would bring", "Where a step spends its time", "Over time",
        "In the loaders", "Memory", "Conditions",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1200, 360])
def test_all_rows_share_one_axis(pages, page, width):
    browser = page(pages["gpus"], width=width)
    edges = browser.execute_script(
        "return [...document.querySelectorAll('#time > .lanes > :is(.plot, .ticks, .signs)')]"
        ".map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])"
    )
    assert len(edges) > 10
    assert max(max(e[i] for e in edges) - min(e[i] for e in edges) for i in (0, 1)) < 0.5


@pytest.mark.parametrize("dark", [False, True])
def test_a_gap_is_hatched_in_every_row(pages, page, dark):
    browser = page(pages["gpus"], dark=dark)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#time > .lanes > .plot:not(.none):not(.doing)')].map(p => {"
        "  const own = p.getBoundingClientRect();"
        "  return [...p.querySelectorAll('.hatch')].map(h => ({ r: h.getBoundingClientRect(),"
        "    image: getComputedStyle(h).backgroundImage }))"
        "   .map(h => [(h.r.left - own.left) / own.width, (h.r.right - own.left) / own.width, h.r.height, h.image]);"
        "})"
    )
    assert len(rows) > 8
    for holes in rows:
        (left, right, height, image) = max(holes, key=lambda h: h[1] - h[0])
        assert (left, right) == pytest.approx((500 / 1560, 700 / 1560), abs=0.005)
        assert height > 30 and "gradient" in image


def test_unknown_is_written_where_the_curve_would_be(pages, page):
    browser = page(pages["gpus"])
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    said = "[...document.querySelectorAll('.plot.none em')].map(e => e.textContent)"
    assert browser.execute_script(f"return {said}") == ["unknown: NVML: not supported on a MIG instance"]
    browser = page(pages["alone"])
    assert browser.execute_script(f"return {said}") == ["unknown: this process uses no GPU"]
    browser = page(pages["little"])
    tiles = browser.execute_script("return [...document.querySelectorAll('.tile b')].map(b => b.textContent)")
    assert tiles == ["unknown"] * 5


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_schemes(pages, page, dark):
    for name in ("gpus", "training", "comparison"):
        browser = page(pages[name], dark=dark)
        browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert browser.execute_script(CONTRAST) == []


def test_print_is_on_white_and_whole(pages, page):
    browser = page(pages["gpus"], width=800, dark=True, media="print")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script(
        "return [...document.querySelectorAll('details > :last-child')].every(e => e.getClientRects()[0].height > 0)"
    )
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000
