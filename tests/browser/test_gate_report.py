"""The gate's report in a real browser: inert, complete, and readable wherever it is opened."""

import html
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gate"))
from simulated import evaluation, picture_files

from kfp_gate.gate import report
from kfp_gate.gate.judging import Rival, judge_evaluation
from kfp_gate.gate.settings import gate_settings
from kfp_gate.gate.verdict import Champion, Separation

pytestmark = pytest.mark.all_only

HOSTILE = (
    "<img src=x onerror=\"window.hacked='img'\">",
    "</title></style></script><script>window.hacked='script'</script>",
    '" onmouseover="window.hacked=\'attribute\'" x="',
    "{{ 7 * 7 }} 원뿔 (소형) 50%",
)
COUNTS = (1, 4, 200)


@dataclass(frozen=True)
class Written:
    path: Path
    classes: tuple[str, ...]


@pytest.fixture(scope="session")
def reports(tmp_path_factory) -> dict[int, Written]:
    folder = tmp_path_factory.mktemp("reports")
    pictures = picture_files(folder / "pictures", 40)
    found = {}
    for count in COUNTS:
        long = "a name of many words that does not break_at_all_in_the_middle"
        names = [*HOSTILE, *(f"{i} {long}" for i in range(count))][:count] if count > 1 else ["cone"]
        skill = {name: 0.35 + 0.6 * (i % 7) / 6 for i, name in enumerate(names)}
        files = tuple(f"{'x' * 80}/<script>window.hacked='file'</script> {i}.jpg" for i in range(40))
        more = {"images": 40, "per_image": 2.0 if count < 10 else 0.4, "names": files}
        absent = tuple(names[-1:]) if count > 1 else ()
        mine = evaluation(skill, absent=absent, **more)
        theirs = evaluation({k: v * 0.95 for k, v in skill.items()}, absent=absent, sha256="b" * 64, **more)
        rival = Rival(Champion("compared", "models:/<b>cones</b>@champion", "b" * 64), theirs)
        asked = gate_settings(
            min_map50=0.5, decide="confident", resamples=200,
            class_thresholds={"*": {"map50": {"min": 0.6, "max_drop": 0.1}}},
        )  # fmt: skip
        judged = judge_evaluation(mine, asked, separation=Separation("proven", 500), rival=rival)
        path = folder / f"report-{count}.html"
        path.write_text(report.html(judged, mine, champion=theirs, images=pictures), encoding="utf-8")
        found[count] = Written(path, tuple(names))
    return found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("width", "dark", "media"), [(1200, False, "screen"), (360, True, "screen"), (800, False, "print")]
)
def test_no_error_no_sideways_scroll_nothing_from_outside(reports, page, count, width, dark, media):
    browser = page(reports[count].path, width=width, dark=dark, media=media)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return window.hacked") is None
    outside = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
    )
    assert outside == []


def test_hostile_names_are_text(reports, page):
    browser = page(reports[4].path)
    names = browser.execute_script("return [...document.querySelectorAll('#classes td.name')].map(c => c.textContent)")
    assert sorted(names) == sorted(reports[4].classes)
    assert browser.execute_script("return document.scripts.length") == 1
    assert browser.execute_script("return document.querySelectorAll('[onerror], [onmouseover], [onclick]').length") == 0
    assert "<script>window.hacked='file'" in browser.execute_script(
        "return document.querySelector('.sheet figcaption').textContent"
    )


def test_a_script_that_slipped_through_would_not_run(reports, page, tmp_path):
    """Escaping comes first; the page's policy is the second lock. Here the first is picked on purpose."""
    text = reports[4].path.read_text(encoding="utf-8")
    tainted = tmp_path / "tainted.html"
    tainted.write_text(text.replace("<body>", "<body><script>window.hacked = 1</script><img src=x onerror='hacked=1'>"))
    browser = page(tainted)
    assert browser.execute_script("return window.hacked") is None
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_verdict_first(reports, page):
    browser = page(reports[4].path, width=360)
    top = browser.execute_script("return document.querySelector('h1').getBoundingClientRect().top")
    assert top < 200
    assert browser.execute_script("return document.querySelector('h1').textContent").startswith("Refused")


def test_tables_sort_by_number_with_unknown_last(reports, page):
    browser = page(reports[200].path)
    column = "[...document.querySelectorAll('#classes tbody tr')].map(r => r.cells[3].dataset.sort)"
    click = "[...document.querySelectorAll('#classes th button')].find(b => b.textContent === 'AP50').click()"
    for order in (1, -1):
        browser.execute_script(click)
        values = browser.execute_script(f"return {column}")
        assert values[-1] == ""  # the class without objects
        numbers = [float(v) for v in values if v]
        assert numbers == sorted(numbers, reverse=order < 0)
        assert len(numbers) == 199


def test_a_class_can_be_found_among_200(reports, page):
    browser = page(reports[200].path)
    browser.execute_script(
        "const box = document.querySelector('input.filter'); box.value = '원뿔'; box.dispatchEvent(new Event('input'))"
    )
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#classes tbody tr')].filter(r => r.offsetHeight > 0).length"
    )
    assert shown == 1


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_schemes(reports, page, dark):
    browser = page(reports[4].path, dark=dark)
    poor = browser.execute_script(CONTRAST)
    assert poor == []


def test_print_is_on_white_and_whole(reports, page):
    browser = page(reports[200].path, width=800, dark=True, media="print")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    # What is folded on the screen is on paper, and nothing is cut by a scroll box.
    assert browser.execute_script(
        "return [...document.querySelectorAll('details > :last-child')].every(e => e.getClientRects()[0].height > 0)"
    )
    assert browser.execute_script(
        "return [...document.querySelectorAll('.tall')].every(d => d.scrollHeight <= d.clientHeight + 1)"
    )
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000


def test_in_the_sandboxed_frame_of_the_pipelines_page(reports, page, tmp_path):
    text = reports[4].path.read_text(encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(f'<iframe sandbox="allow-scripts" width=700 height=600 srcdoc="{html.escape(text)}"></iframe>')
    browser = page(outer)
    browser.switch_to.frame(0)
    try:
        assert browser.execute_script("return document.querySelectorAll('#classes th button').length") > 5
        assert browser.execute_script("return document.querySelectorAll('.sheet img').length") > 0
        assert browser.execute_script("return document.querySelector('.sheet img').naturalWidth") > 100
    finally:
        browser.switch_to.default_content()
    assert browser.get_log("browser") == []


CONTRAST = """
const parse = (c) => c.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const f = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
};
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c;
  }
  return [255, 255, 255];
};
const poor = [];
for (const e of document.querySelectorAll("h1, h2, h3, p, li, td, th, b, .badge, figcaption, summary, svg text")) {
  if (!e.textContent.trim() || !e.getClientRects().length || e.closest(".matrix")) continue;
  const style = getComputedStyle(e);
  const ink = light(parse(e.tagName === "text" ? style.fill : style.color));
  const [a, b] = [ink, light(ground(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) poor.push(`${e.tagName} ${e.className} ${ratio.toFixed(2)} ${e.textContent.slice(0, 30)}`);
}
return poor;
"""
