"""Which functions the making of batches spends its time in: cProfile, in whichever process makes them, while a shared
flag is up.

A flag is one byte of memory that loader processes share with the process that raises it, so it works on processes
that run already. What a batch cost travels inside of it (`loading.Made.profile`) and is merged by `FunctionTimes`.

cProfile knows functions, not parts. A function belongs to the part that its callers belong to, in shares of its own
time by caller, as gprof spreads it (Graham, Kessler, McKusick, "gprof: a call graph execution profiler", 1982).
File names without folders, line numbers and names are all that is kept: no path, no argument.
"""

import cProfile
import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType
from typing import Any, Protocol

OTHER, TRANSFORM = "other", "transform:"

ROOTS = {
    "TimedDataset.get_image_and_label": "labels", "TimedDataset.load_image": "resize", "_TimedRead.__call__": "decode",
    "_Numpy.fromfile": "read", "_CachedPath.exists": "open", "<built-in method _io.open>": "open",
    "read_file": "read", "TimedCollate.__call__": "collate", "TimedItems.__getitem__": OTHER,
    "TimedDataset.__getitem__": OTHER,
}  # fmt: skip
"""Functions that begin a part, see `kfp_gate.observing.loading` and `kfp_gate.training.loader_parts`."""

OURS = ("parts.py", "loading.py", "loader_parts.py", "loader_profile.py")
"""Files that only measure: their functions are not shown."""

CLOCKS = tuple(f"<built-in method time.{name}>" for name in ("perf_counter", "thread_time"))
"""What they call."""

ROUNDS = 40
"""Deep enough for the longest chain of callers; stops earlier once nothing moves."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Flag(Protocol):
    """One shared byte: `multiprocessing.RawValue("b")`."""

    value: int


@dataclass
class _State:
    flag: Flag | None = None
    running: cProfile.Profile | None = None


_state = _State()


def follow(flag: Flag) -> None:
    """Profile what this process makes while the flag is up."""
    _state.flag = flag


def begin() -> None:
    """A batch begins."""
    if _state.flag is None or not _state.flag.value or sys.getprofile() is not None:
        # Another profiler is at work in this thread: its owner's numbers are not worth less than ours.
        return
    profile = cProfile.Profile()
    try:
        profile.enable()
    except ValueError:
        # Later versions of Python say so themselves.
        return
    _state.running = profile


def end() -> str:
    """The profile of the batch that ends here, for `FunctionTimes.add`; empty if none was taken."""
    profile, _state.running = _state.running, None
    if profile is None:
        return ""
    profile.disable()
    return _packed(profile)


class FunctionTimes:
    """The profiles of several batches, merged."""

    def __init__(self) -> None:
        self.batches = 0
        self._times: dict[tuple[str, int, str], list[float]] = {}
        self._callers: dict[tuple[str, int, str], dict[tuple[str, int, str], float]] = {}

    def add(self, profile: str) -> None:
        """Add one batch's."""
        content = json.loads(profile)
        keys = [(f[0], int(f[1]), f[2]) for f in content["functions"]]
        for key, (calls, own, total) in zip(keys, (f[3:] for f in content["functions"]), strict=True):
            sums = self._times.setdefault(key, [0, 0.0, 0.0])
            sums[0] += calls
            sums[1] += own
            sums[2] += total
        for caller, callee, own in content["calls"]:
            found = self._callers.setdefault(keys[callee], {})
            found[keys[caller]] = found.get(keys[caller], 0.0) + own
        self.batches += 1

    def top(self, count: int, transforms: Collection[str]) -> list[dict[str, Any]]:
        """The functions with the most time of their own.

        Args:
            count: how many.
            transforms: names of the transforms' parts, such as "transform:RandomHSV".

        Returns:
            `function` ("file.py:12:Class.name"), `part`, `calls`, `own_s` and `total_s` (with what it called).
        """
        parts = self._parts({name.removeprefix(TRANSFORM) for name in transforms if name.startswith(TRANSFORM)})
        shown = [k for k in self._times if k[0] not in OURS and k[2] not in CLOCKS]
        shown.sort(key=lambda k: (-self._times[k][1], k))
        return [
            {
                "function": f"{k[0]}:{k[1]}:{k[2]}", "part": parts[k], "calls": int(self._times[k][0]),
                "own_s": round(self._times[k][1], 6), "total_s": round(self._times[k][2], 6),
            }
            for k in shown[:count]
        ]  # fmt: skip

    def _parts(self, transforms: Collection[str]) -> dict[tuple[str, int, str], str]:
        """The part that most of a function's own time belongs to."""
        known = {k: p for k in self._times if (p := _root(k[2], transforms)) is not None}
        shares: dict[Any, Mapping[str, float]] = {k: {p: 1.0} for k, p in known.items()}
        open_ones = [k for k in self._times if k not in known]
        for key in open_ones:
            shares[key] = {} if self._callers.get(key) else {OTHER: 1.0}
        for _ in range(ROUNDS):
            moved = 0.0
            for key in open_ones:
                callers = self._callers.get(key)
                if not callers:
                    continue
                new: dict[str, float] = {}
                for caller, own in callers.items():
                    for part, share in shares.get(caller, {}).items():
                        # A function too fast for the clock still belongs to somebody.
                        new[part] = new.get(part, 0.0) + (own + 1e-9) * share
                whole = sum(new.values())
                new = {p: s / whole for p, s in new.items()} if whole else {}
                moved = max(moved, *(abs(new.get(p, 0.0) - shares[key].get(p, 0.0)) for p in {*new, *shares[key]}), 0.0)
                shares[key] = new
            if moved < 1e-6:
                break
        return {k: max(s, key=lambda p: (s[p], p)) if (s := dict(shares[k])) else OTHER for k in self._times}


def _root(name: str, transforms: Collection[str]) -> str | None:
    if name in ROOTS:
        return ROOTS[name]
    first = name.partition(".")[0]
    return TRANSFORM + first if first in transforms else None


def _packed(profile: cProfile.Profile) -> str:
    entries = profile.getstats()
    places = {id(entry.code) if isinstance(entry.code, CodeType) else entry.code: i for i, entry in enumerate(entries)}
    functions, calls = [], []
    for index, entry in enumerate(entries):
        functions.append([*_name(entry.code), entry.callcount, entry.inlinetime, entry.totaltime])
        for call in entry.calls or ():
            place = places.get(id(call.code) if isinstance(call.code, CodeType) else call.code)
            if place is not None:
                calls.append([index, place, call.inlinetime])
    return json.dumps({"functions": functions, "calls": calls}, separators=(",", ":"))


def _name(code: Any) -> tuple[str, int, str]:
    if isinstance(code, CodeType):
        return PurePath(code.co_filename).name, code.co_firstlineno, code.co_qualname
    return "~", 0, _ADDRESS.sub("", str(code))
