"""The log of one container run as the kubelet serves it: records, stamps, rotation, 16 KiB parts."""

import threading
import time
from array import array
from bisect import bisect_left
from datetime import UTC, datetime

PART = 16 * 1024


class ContainerLog:
    """Rendered records in one buffer, so that a million lines cost their bytes and 24 more each.

    Only the first part of a split line carries a stamp; each part has its own time for `sinceTime`.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.data = bytearray()
        self.times = array("q")
        self.offsets = array("q")
        self.first = 0
        self.ended = False
        self._split_open = False

    def write(self, text: bytes, at_ns: int | None = None, newline: bool = True) -> None:
        """Append one line, cut into parts of 16 KiB as the runtime does."""
        at = time.time_ns() if at_ns is None else at_ns
        with self.changed:
            parts = [text[n : n + PART] for n in range(0, len(text), PART)] or [b""]
            for number, part in enumerate(parts):
                self.times.append(at + number)
                self.offsets.append(len(self.data))
                if number == 0 and not self._split_open:
                    self.data += stamp(at).encode() + b" "
                self.data += part
            if newline:
                self.data += b"\n"
            self._split_open = not newline
            self.changed.notify_all()

    def append_rendered(self, data: bytes, times: "array[int]", offsets: "array[int]") -> None:
        """Append many prepared lines at once; offsets are relative to `data`."""
        with self.changed:
            base = len(self.data)
            self.times.extend(times)
            self.offsets.extend(array("q", (base + o for o in offsets)))
            self.data += data
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def rotate(self) -> None:
        """From now on a new reader sees only what comes after; those who read go on."""
        with self.changed:
            self.first = len(self.times)

    def start(self, since_ns: int | None, tail: int | None) -> int:
        """The offset at which a reader begins."""
        with self.changed:
            index = self.first
            if since_ns is not None:
                index = max(index, bisect_left(self.times, since_ns))
            begin = self.offsets[index] if index < len(self.offsets) else len(self.data)
            if tail is not None:
                begin = max(begin, self._tail(tail))
            return begin

    def _tail(self, lines: int) -> int:
        end = len(self.data)
        position = end - 1 if self.data.endswith(b"\n") else end
        for _ in range(lines):
            position = self.data.rfind(b"\n", 0, position)
            if position < 0:
                return 0
        return position + 1

    def read(self, begin: int, most: int, follow: bool, timeout: float) -> bytes | None:
        """Bytes from an offset; b"" after `timeout` without news; None at the end."""
        with self.changed:
            if begin >= len(self.data) and follow and not self.ended:
                self.changed.wait(timeout)
            if begin < len(self.data):
                return bytes(memoryview(self.data)[begin : begin + most])
            return b"" if follow and not self.ended else None


def stamp(at_ns: int) -> str:
    """RFC3339Nano: trailing zeros of the fraction are cut, and the point with them."""
    whole = datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = f"{at_ns % 1_000_000_000:09d}".rstrip("0")
    return f"{whole}.{fraction}Z" if fraction else f"{whole}Z"
