"""An image's name changes with its content and with nothing else."""

import json
import re

import pytest

from images.conftest import rewrite
from kfp_gate.errors import InvalidInput
from kfp_gate.images.build import record
from kfp_gate.images.digests import FORMAT, parse_digests
from kfp_gate.images.names import content_hash, image_names, image_of, reference

DIGEST = "sha256:" + "ab" * 32


def test_every_component_has_an_image_and_preflight_shares_the_gates():
    assert set(image_names()) >= {
        "split-dataset", "launch-training", "worker", "validation-gate", "register-model", "record-outcome",
    }  # fmt: skip
    assert image_of("split_dataset") == image_of("split-dataset") == "split-dataset"
    assert image_of("preflight") == "validation-gate"
    assert reference("preflight") == reference("validation_gate")


def test_without_a_push_the_name_is_a_tag_of_the_content(copy):
    files = copy.root / "images"
    (files / "images.lock").write_text("")
    before = {image: reference(image, files=files) for image in image_names()}
    assert all(re.fullmatch(rf"kfp-gate/{image}:[0-9a-f]{{12}}", name) for image, name in before.items())
    assert reference("worker", "registry.example.com/team/", files) == before["worker"].replace(
        "kfp-gate", "registry.example.com/team"
    )

    rewrite(files / "worker" / "constraints.txt", "psutil==", "psutil==0.")
    after = {image: reference(image, files=files) for image in image_names()}
    assert [image for image in before if before[image] != after[image]] == ["worker"]

    with (files / "Containerfile").open("a") as file:
        file.write("# a comment too\n")
    assert all(reference(image, files=files) != after[image] for image in image_names())


def test_line_ends_of_a_checkout_do_not_change_a_name(copy):
    files = copy.root / "images"
    before = content_hash("worker", files)
    lock = files / "worker" / "constraints.txt"
    lock.write_bytes(lock.read_bytes().replace(b"\n", b"\r\n"))
    assert content_hash("worker", files) == before


def test_a_pushed_image_is_named_by_digest_until_its_files_change(copy):
    files = copy.root / "images"
    (files / "images.lock").write_text("")
    record(copy, "worker", "registry.example.com/team/", DIGEST)
    assert reference("worker", files=files) == f"registry.example.com/team/worker@{DIGEST}"
    assert reference("worker", "mirror.example.org", files) == f"mirror.example.org/worker@{DIGEST}"
    assert reference("split-dataset", files=files).startswith("kfp-gate/split-dataset:")

    rewrite(files / "worker" / "constraints.txt", "psutil==", "psutil==0.")
    assert reference("worker", files=files) == f"kfp-gate/worker:{content_hash('worker', files)}"


def test_recording_one_image_changes_one_entry(copy):
    path = copy.root / "images" / "images.lock"
    path.write_text("")
    for image in copy.images:
        record(copy, image, "registry.example.com", DIGEST)
    before = parse_digests(path.read_text())
    record(copy, "worker", "registry.example.com", DIGEST.replace("ab", "cd"))
    after = parse_digests(path.read_text())
    assert [image for image in before if before[image] != after[image]] == ["worker"]
    assert before.keys() == after.keys() == set(copy.images)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        '{"format": 2, "images": {}}',
        json.dumps({"format": FORMAT, "images": {"worker": {"digest": DIGEST}}}),
        json.dumps(
            {"format": FORMAT, "images": {"worker": dict(registry="r", digest="sha256:1", content="c", version="1")}}
        ),
    ],
)
def test_an_unreadable_lock_is_refused(text):
    with pytest.raises(InvalidInput, match=r"images/images\.lock"):
        parse_digests(text)


def test_unknown_component(snapshot):
    with pytest.raises(InvalidInput) as caught:
        reference("spilt_dataset")
    assert "split-dataset" in str(caught.value) and "'spilt_dataset'" in str(caught.value)
