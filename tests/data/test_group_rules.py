"""Every group rule, by itself and in a union."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scenes import clips, picture, write_yolo

from kfp_gate.data.group_rules import evident_group, parse_rules
from kfp_gate.data.splitting import split_dataset
from kfp_gate.errors import InvalidInput

BOX = [(0, 0.5, 0.5, 0.25, 0.25)]


def groups_of(result):
    return {row.image: row.group for m in result.manifests.values() for row in m.rows()}


def partition(result):
    by_group: dict[str, set[str]] = {}
    for image, group in groups_of(result).items():
        by_group.setdefault(group, set()).add(image.rpartition("/")[2])
    return sorted(map(sorted, by_group.values()))


@pytest.mark.parametrize(
    ("image", "group"),
    [
        ("yell-a__0400_1200.jpg", "name:yell-a"),
        ("a/b/clip 7__x__y.png", "name:clip 7"),
        ("drive_frame_000123.jpg", "name:drive"),
        ("drive-frame-12.png", "name:drive"),
        ("DRIVE_Frame12.jpg", "name:DRIVE"),
        ("cat_12_jpg.rf.0a1b2c3d4e5f60718293a4b5c6d7e8f9.jpg", "name:cat_12_jpg"),
        ("clip_frame_3_jpg.rf.0a1b2c3d4e5f60718293a4b5c6d7e8f9.jpg", "name:clip"),
        ("원뿔__1.png", "name:원뿔"),
        ("IMG_20240501_101530.jpg", ""),
        ("000123.jpg", ""),
        ("__1.jpg", ""),
        ("frame_12.jpg", ""),
        ("photo.rf.jpg", ""),
    ],
)
def test_auto_takes_what_a_name_states_and_no_more(image, group):
    assert evident_group(image) == group


@given(st.lists(st.sampled_from(["auto", "none", "folder", "prefix:+", "regex:^(a+)+b", "csv:a+b.csv:c", "exif:1.5"])))
def test_a_union_parses_back_into_its_rules(parts):
    if parts:
        rules = [str(rule) for rule in parse_rules("+".join(parts))]
        assert rules == [*parts, *(["near-duplicates:4"] if "auto" in parts else [])]


@pytest.mark.parametrize(
    "rule",
    [
        "", "by-hand", "prefix", "prefix:", "regex:[", "regex:nothing", "csv:file", "csv::column", "exif:0", "exif:nan",
        "exif:x", "near-duplicates:65", "near-duplicates:-1", "folder:x", "folder+", "none:1",
    ],
)  # fmt: skip
def test_unusable_rules_are_refused(rule):
    with pytest.raises(InvalidInput) as caught:
        parse_rules(rule)
    assert caught.value.where == "group_rule"


def test_none_makes_each_image_its_own_group_named_by_content(tmp_path):
    root = write_yolo(tmp_path / "set", clips(4, 3))
    first = split_dataset(str(root), group_rule="none")
    assert len(set(groups_of(first).values())) == 12
    for path in sorted((root / "images").iterdir()):
        path.rename(path.with_name("renamed-" + path.name))
        label = root / "labels" / f"{path.stem}.txt"
        label.rename(label.with_name("renamed-" + label.name))
    second = split_dataset(str(root), group_rule="none")
    assert sorted(groups_of(second).values()) == sorted(groups_of(first).values())


def test_folder_joins_one_site_over_the_folders_of_splits(tmp_path):
    names = [
        f"images/{split}/site{s}/{i}-{split}.png" for split in ("train", "val") for s in range(4) for i in range(2)
    ]
    root = write_yolo(tmp_path / "set", dict.fromkeys(names, BOX))
    groups = groups_of(split_dataset(str(root), group_rule="folder"))
    assert set(groups.values()) == {f"folder:site{s}" for s in range(4)}


def test_regex_names_groups_by_its_captures_and_is_loud_about_the_rest(tmp_path):
    names = [f"images/{site}-{i}_{cam}.png" for site in "abcd" for i in range(2) for cam in "xy"] + ["images/stray.png"]
    root = write_yolo(tmp_path / "set", dict.fromkeys(names, BOX))
    result = split_dataset(str(root), group_rule=r"regex:([a-d])-\d+_(\w)")
    assert {g for g in groups_of(result).values() if g.startswith("name:")} == {
        f"name:{site}/{cam}" for site in "abcd" for cam in "xy"
    }
    assert any("finds no group for 1 of 17 images ('images/stray.png')" in note for note in result.notes)
    with pytest.raises(InvalidInput, match="finds a group for none of 17 images"):
        split_dataset(str(root), group_rule="regex:(never)")


def test_csv_groups_by_a_column_and_refuses_a_table_with_holes(tmp_path):
    root = write_yolo(tmp_path / "set", clips(6, 2))
    images = sorted(p.relative_to(root).as_posix() for p in (root / "images").iterdir())
    rows = [f"{image if i % 2 else image.rpartition('/')[2]},s{i % 3}" for i, image in enumerate(images)]
    (root / "sites.csv").write_text("file_name,site\n" + "\n".join(rows) + "\n")
    result = split_dataset(str(root), group_rule="csv:sites.csv:site")
    assert set(groups_of(result).values()) == {"csv:s0", "csv:s1", "csv:s2"}
    (root / "sites.csv").write_text("file_name,site\n" + "\n".join(rows[2:]) + "\n")
    with pytest.raises(InvalidInput, match="2 of 12 images have no group in the table") as caught:
        split_dataset(str(root), group_rule="csv:sites.csv:site")
    assert [p.where for p in caught.value.problems] == images[:2]
    with pytest.raises(InvalidInput, match="columns 'file_name', 'site'"):
        split_dataset(str(root), group_rule="csv:sites.csv:place")


def test_exif_cuts_where_a_camera_paused(tmp_path):
    root = write_yolo(tmp_path / "set", {f"images/{i}.jpg": BOX for i in range(9)})
    times = ["10:00:00", "10:00:20", "10:00:40", "10:05:00", "10:05:30", "11:00:00", "11:00:10", "11:00:20", None]
    for i, taken in enumerate(times):
        exif = Image.Exif()
        if taken:
            exif[0x010F] = "Maker"
            exif.get_ifd(0x8769)[0x9003] = f"2024:05:01 {taken}"
        picture(i).save(root / f"images/{i}.jpg", exif=exif)
    result = split_dataset(str(root), group_rule="exif:60")
    assert partition(result) == [
        ["0.jpg", "1.jpg", "2.jpg"],
        ["3.jpg", "4.jpg"],
        ["5.jpg", "6.jpg", "7.jpg"],
        ["8.jpg"],
    ]
    assert any("finds no group for 1 of 9 images" in note for note in result.notes)


def test_union_holds_together_what_any_rule_joins(tmp_path):
    images = clips(8, 2)
    root = write_yolo(tmp_path / "set", images)
    # clip 1 begins with the very picture that ends clip 0, and clip 2 with one that looks like the end of clip 1
    copy = (root / "images/clip000__001.png").read_bytes()
    (root / "images/clip001__000.png").write_bytes(copy)
    bright = Image.open(root / "images/clip001__001.png").point(lambda v: min(255, v + 2))
    bright.save(root / "images/clip002__000.png")
    plain = split_dataset(str(root), group_rule="prefix:__")
    assert len(set(groups_of(plain).values())) == 7  # equal bytes always hold together
    assert plain.coverage.duplicates == 1
    union = split_dataset(str(root), group_rule="prefix:__+near-duplicates:4")
    assert len(set(groups_of(union).values())) == 6
    assert {g for i, g in groups_of(union).items() if i[:14] <= "images/clip002"} == {"name:clip000"}
    assert groups_of(split_dataset(str(root))) == groups_of(union)  # which is what `auto` comes to here
    assert any("near-duplicates join 7 groups of the other rules into 6" in note for note in union.notes)


def test_equal_keys_of_two_rules_are_not_one_group(tmp_path):
    names = [
        f"images/{folder}/{clip}__{i}.png" for folder, clip in ("ax", "xb", "by", "yc", "cz", "zd") for i in (0, 1)
    ]
    root = write_yolo(tmp_path / "set", dict.fromkeys(names, BOX))
    result = split_dataset(str(root), group_rule="regex:images/(.)/+prefix:__")
    assert len(set(groups_of(result).values())) == 6
