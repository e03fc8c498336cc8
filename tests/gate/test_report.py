"""The report's text: whole, self-contained and inert, without a browser. tests/browser opens it in one."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import evaluation, picture_files

from kfp_gate.gate import report
from kfp_gate.gate.judging import judge_evaluation
from kfp_gate.gate.settings import gate_settings
from kfp_gate.gate.thumbnails import mistakes, worst_images
from kfp_gate.gate.verdict import Separation


class Reader(HTMLParser):
    """Collects tags, attributes and text; the page's tags must be closed in order."""

    VOID = frozenset({"meta", "img", "input", "link", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.words, self.tags = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page(skill, images=None, **more):
    found = evaluation(skill, images=12, **more)
    asked = gate_settings(min_map50=0.5, class_thresholds={"*": {"map50": 0.6}}, resamples=50)
    judged = judge_evaluation(found, asked, separation=Separation("proven", 10))
    return report.html(judged, found, images=images)


@pytest.mark.parametrize("count", [1, 3, 200])
def test_nothing_comes_from_outside_and_every_tag_is_closed(count, tmp_path):
    read = Reader(page({f"class {i}": 0.7 for i in range(count)}, picture_files(tmp_path, 12), per_image=0.5))
    assert read.open == []
    assert read.tags.count("script") == 1
    outside = [v for k, v in read.attributes if k in ("src", "href", "action", "srcset") and not v.startswith("data:")]
    assert outside == []
    assert not any(k.startswith("on") for k, _ in read.attributes)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), min_size=1, max_size=3, unique=True
    )
)
def test_any_class_name_is_only_text(names):
    plain = Reader(page({f"c{i}": 0.7 for i in range(len(names))}))
    odd = Reader(page(dict.fromkeys(names, 0.7)))
    # The same page but for the words: no name adds a tag or an attribute.
    assert odd.tags == plain.tags
    assert [k for k, _ in odd.attributes] == [k for k, _ in plain.attributes]


def test_worst_images_come_first_and_a_broken_file_is_left_out(tmp_path):
    found = evaluation({"cone": 0.3, "car": 0.5}, images=12)
    files = picture_files(tmp_path, 12)
    all_ = worst_images(found, files, confidence=0.25, most=5)
    counts = [t.missed + t.false for t in all_]
    missed, false = mistakes(found.records, 0.25)
    assert counts == sorted((missed + false).tolist(), reverse=True)[:5]
    assert all(t.data.startswith("data:image/jpeg;base64,") for t in all_)
    assert all(sum(b.kind == "missed" for b in t.boxes) == t.missed for t in all_)
    assert all(sum(b.kind == "false" for b in t.boxes) == t.false for t in all_)
    files[found.images.index(all_[0].name)].write_bytes(b"cut")
    assert worst_images(found, files, confidence=0.25, most=4)[0].name == all_[1].name


def test_a_model_without_mistakes_shows_no_worst_images(tmp_path):
    text = page({"cone": 1.0}, picture_files(tmp_path, 12), false_rate=0.0)
    assert "No image with a mistake." in text
