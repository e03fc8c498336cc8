"""A source that changed under its URI is noticed from its listing."""

from scenes import clips, picture, write_yolo

from kfp_gate.data.freshness import listing_drift
from kfp_gate.data.splitting import split_dataset


def test_missing_resized_and_added_images_are_told_apart(tmp_path):
    root = write_yolo(tmp_path / "set", clips(8, 2))
    manifests = split_dataset(str(root)).manifests
    assert not listing_drift(manifests) and str(listing_drift(manifests)) == "no difference"
    (root / "images/clip000__000.png").unlink()
    picture(1, (90, 90)).save(root / "images/clip001__000.png")
    picture(2).save(root / "images/new.png")
    drift = listing_drift(manifests)
    assert (drift.missing, drift.resized, drift.added) == (
        ("images/clip000__000.png",), ("images/clip001__000.png",), ("images/new.png",),
    )  # fmt: skip
    assert str(drift).startswith("1 missing, such as 'images/clip000__000.png'; 1 resized")
