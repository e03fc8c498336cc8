"""A dataset that grows: earlier manifests pin what they assigned, and a bridge can be nowhere."""

import pytest
from PIL import Image
from scenes import clips, picture, write_yolo
from test_split_properties import places

from kfp_gate.data.splitting import split_dataset, split_to_folder
from kfp_gate.errors import InvalidInput

BOX = "0 0.5 0.5 0.25 0.25\n"


def brighter(source, target, by=2):
    Image.open(source).point(lambda v: min(255, v + by)).save(target)


def add(root, name, image):
    image.save(root / f"images/{name}.png")
    (root / f"labels/{name}.txt").write_text(BOX)


@pytest.fixture
def grown(tmp_path):
    """A split of 30 pictures on their own, and the set it was made from."""
    root = write_yolo(tmp_path / "set", {f"images/{i:02}.png": [(0, 0.5, 0.5, 0.25, 0.25)] for i in range(30)})
    first = split_to_folder(str(root), tmp_path / "first", group_rule="none+near-duplicates:4")
    return root, tmp_path / "first", places(first)


def test_a_look_alike_of_an_old_image_follows_it(grown):
    root, first, was = grown
    for i in range(30):
        brighter(root / f"images/{i:02}.png", root / f"images/aa-{i:02}.png")
        (root / f"labels/aa-{i:02}.txt").write_text(BOX)
    result = split_dataset(str(root), group_rule="none+near-duplicates:4", previous=str(first))
    now = places(result)
    assert {image: now[image] for image in was} == was
    assert all(now[f"images/aa-{i:02}.png"] == was[f"images/{i:02}.png"] for i in range(30))


def test_new_images_take_the_place_their_hash_gives(grown):
    root, first, was = grown
    for i in range(40):
        add(root, f"new{i:02}", picture(500 + i))
    result = split_dataset(str(root), group_rule="none+near-duplicates:4", previous=str(first))
    now = places(result)
    assert {image: now[image] for image in was} == was
    alone = places(split_dataset(str(root), group_rule="none+near-duplicates:4"))
    new = [image for image in now if "new" in image]
    assert len(new) == 40 and all(now[i] == alone[i] for i in new)


def test_renamed_and_reordered_old_images_stay(grown):
    root, first, was = grown
    for folder in ("images", "labels"):
        for path in sorted((root / folder).iterdir()):
            path.rename(path.with_name("z" + path.name))
    now = places(split_dataset(str(root), group_rule="none", previous=str(first), seed=99))
    assert {i.replace("/z", "/"): p for i, p in now.items()} == was


def test_a_bridge_is_in_no_split_nor_is_its_scene(grown):
    root, first, was = grown
    train = next(i for i, p in was.items() if p.split == "train")
    test = next(i for i, p in was.items() if p.split == "test")
    # A scene (by its name) with look-alikes of a training and of a test image: all of it is a bridge.
    brighter(root / train, root / "images/scene__1.png")
    brighter(root / test, root / "images/scene__2.png")
    picture(900).save(root / "images/scene__3.png")
    # Another scene touches the test image alone, and follows it.
    brighter(root / test, root / "images/other__1.png", 3)
    picture(901).save(root / "images/other__2.png")
    for name in ("scene__1", "scene__2", "scene__3", "other__1", "other__2"):
        (root / f"labels/{name}.txt").write_text(BOX)
    result = split_dataset(str(root), previous=str(first))
    now = places(result)
    assert {image: now[image] for image in was} == was
    bridges = {d.image: d for d in result.rejects if d.kind == "bridge"}
    assert set(bridges) == {f"images/scene__{i}.png" for i in (1, 2, 3)}
    assert {now[f"images/other__{i}.png"].split for i in (1, 2)} == {"test"}
    assert set(now) | set(bridges) == {p.relative_to(root).as_posix() for p in (root / "images").iterdir()}
    assert {d.action for d in bridges.values()} == {"dropped"}
    assert train in bridges["images/scene__3.png"].found and test in bridges["images/scene__3.png"].found
    assert any(
        "new images belong to groups that the previous manifests put into different splits" in n for n in result.notes
    )


def test_a_rule_that_joins_what_was_divided_is_refused(grown):
    root, first, _ = grown
    with pytest.raises(InvalidInput, match="pairs of images that the group rule joins are in different splits"):
        split_dataset(str(root), group_rule=r"regex:(\d)\d\.png", previous=str(first))


def test_missing_and_changed_manifests_are_refused(grown, tmp_path):
    root, first, _ = grown
    with pytest.raises(InvalidInput, match="no manifest of train"):
        split_dataset(str(root), previous=str(tmp_path / "nowhere"))
    data = bytearray((first / "train.parquet").read_bytes())
    (first / "train.parquet").write_bytes(b"not parquet")
    with pytest.raises(InvalidInput, match="no dataset manifest"):
        split_dataset(str(root), previous=str(first))
    (first / "train.parquet").unlink()
    (first / "train").write_bytes(bytes(data))  # as a pipeline names its artifacts
    assert split_dataset(str(root), previous=str(first), group_rule="none").manifests


def test_stratified_balances_classes_around_pins(tmp_path):
    images = {}
    for clip in range(60):
        for frame in range(3):
            images[f"images/c{clip:02}__{frame}.png"] = [(0, 0.5, 0.5, 0.25, 0.25)] + (
                [(1, 0.25, 0.25, 0.125, 0.25)] * (clip % 5 == 0) + [(2, 0.75, 0.75, 0.125, 0.25)] * (clip % 20 == 1)
            )
    root = write_yolo(tmp_path / "set", images, names="names: [common, rare, rarest]")
    result = split_to_folder(str(root), tmp_path / "first", strategy="stratified", group_rule="prefix:__")
    shares = result.coverage.instances / result.coverage.instances.sum(axis=1, keepdims=True)
    assert abs(shares[0] - (0.7, 0.15, 0.15)).max() < 0.02 and abs(shares[1] - (0.7, 0.15, 0.15)).max() < 0.06
    assert (result.coverage.instances[2] == 3).all()  # three clips hold the rarest class: one for each split
    assert any("'rarest' 36.7% (3 groups)" in note for note in result.notes)
    was = places(result)
    for i in range(30):
        add(root, f"d{i:02}__0", picture(1000 + i))
    now = places(
        split_dataset(
            str(root), strategy="stratified", group_rule="prefix:__", previous=str(tmp_path / "first"), seed=5
        )
    )
    assert {image: now[image] for image in was} == was


def test_fixed_splits_are_kept_and_a_divided_group_is_a_defect(tmp_path):
    images = {**clips(4, 2, "images/train")}
    images |= {k.replace("clip", "tape"): v for k, v in clips(3, 2, "images/val").items()}
    images |= {k.replace("clip", "reel"): v for k, v in clips(3, 2, "images/test").items()}
    root = write_yolo(tmp_path / "set", images, splits="train: images/train\nval: images/val\ntest: images/test")
    result = split_dataset(str(root), strategy="fixed", group_rule="prefix:__")
    assert all(f"/{place.split}/" in image for image, place in places(result).items())
    (root / "images/test/clip000__009.png").write_bytes((root / "images/test/reel000__000.png").read_bytes())
    (root / "labels/test/clip000__009.txt").write_text(BOX)
    with pytest.raises(InvalidInput, match="2 x divided group") as caught:
        split_dataset(str(root), strategy="fixed", group_rule="prefix:__")
    assert "is in train and in test" in str(caught.value)
    dropped = split_dataset(str(root), strategy="fixed", group_rule="prefix:__", rejects="drop")
    assert {d.image for d in dropped.rejects} == {"images/train/clip000__000.png", "images/train/clip000__001.png"}
    assert places(dropped)["images/test/clip000__009.png"].split == "test"
    lacking = write_yolo(tmp_path / "lacking", clips(4, 2, "images/train"))
    with pytest.raises(InvalidInput, match="no image for val and test"):
        split_dataset(str(lacking), strategy="fixed", group_rule="prefix:__")


def test_a_class_short_in_test_is_told_with_the_smallest_share_that_cures_it(tmp_path):
    images = clips(40, 2)
    for i, image in enumerate(images):
        images[image] = [(0, 0.5, 0.5, 0.25, 0.25)] + [(1, 0.25, 0.25, 0.125, 0.25)] * (i % 8 == 0)
    root = write_yolo(tmp_path / "set", images)
    result = split_dataset(str(root), min_instances=4, group_rule="prefix:__")
    short = {s.class_name: s for s in result.coverage.shortfalls}
    assert set(short) == {"post"} and short["post"].instances < 4
    share = float(short["post"].cure.split("test_share=")[1].split()[0])
    cured = split_dataset(
        str(root), min_instances=4, group_rule="prefix:__", shares=(1 - share - 0.15, 0.15, share), on_shortfall="error"
    )
    assert not cured.coverage.shortfalls
    less = split_dataset(
        str(root), min_instances=4, group_rule="prefix:__", shares=(0.851 - share, 0.15, share - 0.001)
    )
    assert less.coverage.shortfalls
    with pytest.raises(InvalidInput, match="1 classes have too few instances"):
        split_dataset(str(root), min_instances=4, group_rule="prefix:__", on_shortfall="error")
    hopeless = split_dataset(str(root), min_instances=11, group_rule="prefix:__").coverage.shortfalls[-1]
    assert "there are 10 in the whole dataset: label 1 more" in hopeless.cure
