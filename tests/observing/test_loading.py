"""Batches of one's own data set carry what they cost."""

import pickle
from pathlib import Path

import pytest

from kfp_gate.observing.loading import PARTS, Loaded, TimedCollate, TimedItems, read_file, unwrap


class Files:
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.classes = ("a", "b")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        raw = read_file(self.paths[index])
        with PARTS.during("decode"):
            return raw.decode()


class Many(Files):
    def __getitems__(self, indexes: list[int]) -> list[str]:
        return [self[i] for i in indexes]


@pytest.mark.parametrize("kind", [Files, Many])
def test_a_batch_carries_its_parts(tmp_path: Path, kind: type[Files]) -> None:
    for name in ("파일 1", "b"):
        (tmp_path / name).write_text(name)
    items = pickle.loads(pickle.dumps(TimedItems(kind([tmp_path / "파일 1", tmp_path / "b"]))))
    assert len(items) == 2 and items.classes == ("a", "b")
    collate = TimedCollate(tuple)
    with PARTS.during("before"):
        pass
    found = collate(items.__getitems__([0, 1]))
    batch, made = unwrap(pickle.loads(pickle.dumps(found)))
    assert isinstance(found, Loaded) and batch == ("파일 1", "b")
    assert made is not None and made.bytes == len("파일 1".encode()) + 1
    assert set(made.parts) == {"open", "read", "decode", "collate", "other"}
    assert [made.parts[n][2] for n in ("open", "read", "decode", "collate")] == [2, 2, 2, 1]
    # A dictionary stays one, and loses the extra key on the way.
    batch, made = unwrap(TimedCollate(lambda samples: {"x": samples})(items.__getitems__([1])))
    assert batch == {"x": ["b"]} and made is not None and made.bytes == 1


def test_a_batch_of_nobodys_making_is_left_as_it_is(tmp_path: Path) -> None:
    assert unwrap([1, 2]) == ([1, 2], None) and unwrap({"x": 1}) == ({"x": 1}, None)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "gone")
    assert PARTS.take()["open"].calls == 1


def test_pinning_keeps_the_parts() -> None:
    torch = pytest.importorskip("torch")
    found = TimedCollate(lambda samples: [torch.zeros(1)])([])
    assert isinstance(found, Loaded)
    try:
        pinned = found.pin_memory()
    except RuntimeError:
        # torch pins nothing on a machine without an accelerator.
        return
    assert pinned.made == found.made and torch.equal(pinned.batch[0], found.batch[0])
