"""Recorded-style NVML answers in place of a driver, and whole timelines that a sampler wrote from them.

A file of `nvml/` names each function with its answer: a value, `{"error": class}`, `{"each": [...]}` (in turn, from the
start again), `{"then": [...]}` (in turn, the last one for ever), or for a function that takes a handle, one of these by
handle. `{"by": [...]}` chooses by the second argument. A function that is not named is one that the driver lacks.
"""

import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline

FOLDER = Path(__file__).parent / "nvml"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def answers(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def module(recorded: dict[str, Any]) -> types.ModuleType:
    """A stand-in for `pynvml`: its constants and errors are the real ones."""
    replay = types.ModuleType("pynvml")
    for name in dir(pynvml):
        if not callable(getattr(pynvml, name)) or name.startswith("NVMLError"):
            setattr(replay, name, getattr(pynvml, name))
    # The old library lacks what it does not know at all; a new one asks the driver, which says so.
    for name in dir(pynvml):
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            setattr(replay, name, _function(recorded.get(name, {"error": "NVMLError_FunctionNotFound"})))
    return replay


@contextmanager
def replayed(name: str | dict[str, Any]) -> Iterator[str]:
    """Within the block `import pynvml` gives the recorded answers; yields the UUID that the run asks for."""
    recorded = answers(name) if isinstance(name, str) else name
    before = sys.modules.get("pynvml")
    sys.modules["pynvml"] = module(recorded)
    try:
        yield recorded["ask"]
    finally:
        if before is not None:
            sys.modules["pynvml"] = before
        else:
            del sys.modules["pynvml"]


def write_timeline(name: str, path: Path, *, samples: int = 6, phase: str = "train", **identity: Any) -> Path:
    """The `gpu` and `sample` lines that a sampler writes while the driver gives the answers of one file."""
    timeline = Timeline(path, **{"run": "replayed", "rank": 0, "node": "here", **identity})
    timeline.phase = phase
    with replayed(name) as uuid:
        sampler = Sampler(timeline, gpu=uuid)
        sampler.introduce()
        for _ in range(samples):
            sampler.write()
    return path


def _function(recorded: Any) -> Callable[..., Any]:
    turns: dict[int, int] = {}

    def answer(value: Any, arguments: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            if "error" in value:
                raise getattr(pynvml, value["error"])()
            for mode in ("each", "then"):
                if mode in value:
                    turn = turns.get(id(value), 0)
                    turns[id(value)] = turn + 1
                    count = len(value[mode])
                    return answer(value[mode][turn % count if mode == "each" else min(turn, count - 1)], arguments)
            if "by" in value:
                return answer(value["by"][arguments[1]], arguments)
            if arguments and arguments[0] in value:
                return answer(value[arguments[0]], arguments)
            if any(isinstance(v, int) for v in value.values()):
                return types.SimpleNamespace(**value)
            raise pynvml.NVMLError_InvalidArgument()
        return value

    return lambda *arguments: answer(recorded, arguments)
