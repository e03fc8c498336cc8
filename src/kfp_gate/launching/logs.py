"""One container's log from its first line to its last, over any number of cut connections.

The server's faults are silent: a cut stream ends as cleanly as a finished one, a reconnect replays up to a
second, and the runtime's rotation can remove what was not read. `Stitcher` decides, line by line, what is new;
`Follower` keeps connecting until the container has ended and its last line has been seen.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kfp_gate.launching.api import Api, Away, Refused
from kfp_gate.launching.pods import Pod

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""A longer line is passed on in parts."""

QUIET_SECONDS = 300.0
"""A stream without a byte for so long is opened anew: a dead network looks like a quiet rank."""

TAIL_LINES = 20
_stamp = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?")


def stamp_key(stamp: "re.Match[bytes]") -> bytes:
    """A stamp in a form whose order is that of time: fraction padded to nine digits, the zone set aside.

    All lines of one container bear the zone of one node, so it takes no part in the order.
    """
    return stamp[1] + b"." + (stamp[2] or b"").ljust(9, b"0")


@dataclass
class Stitcher:
    """What of a replayed stream is new.

    State is the last emitted line's stamp and how many lines with exactly this stamp were emitted; several
    lines may share one. Within a connection, once a new line has come, all that follows is new: a clock
    that steps back on the node then loses nothing.
    """

    last: bytes = b""
    since: str = ""
    same: int = 0
    gaps: int = 0
    _seen: int = 0
    _caught_up: bool = True
    _first: bool = True
    _replaying: bool = False

    def begin(self) -> None:
        """A new connection, which asks for everything since `since`."""
        self._seen = 0
        self._caught_up = not self.last
        self._first = True
        self._replaying = bool(self.last)

    def take(self, lines: Iterable[bytes], emit: Callable[[bytes], None]) -> None:
        """Hand the new ones among complete lines (without their newline) to `emit`, stamps removed."""
        for line in lines:
            stamp = _stamp.match(line)
            if stamp is None:
                # Only the first part of a split line has a stamp. If it lies before `since` its rest comes alone,
                # at the head of the stream; it was emitted with that line.
                if not self._replaying:
                    emit(line)
                continue
            key = stamp[1] + b"." + (stamp[2] or b"").ljust(9, b"0")
            if not self._caught_up and not self._is_new(key):
                continue
            if key == self.last:
                self.same += 1
            else:
                self.last, self.same = key, 1
                self.since = (stamp[1] + stamp[3]).decode()
            emit(line[stamp.end() :])

    def _is_new(self, key: bytes) -> bool:
        first, self._first = self._first, False
        if key < self.last:
            self._replaying = True
            return False
        if key == self.last:
            self._seen += 1
            if self._seen <= self.same:
                self._replaying = True
                return False
        elif first:
            # The last emitted line itself should have come again: the file that held it was rotated away.
            self.gaps += 1
        self._replaying = False
        self._caught_up = True
        return True

    def complete(self, tail: list[bytes]) -> bool:
        """Whether the log's last lines, asked for by themselves, hold nothing that was not emitted."""
        keys = [stamp_key(stamp) for line in tail if (stamp := _stamp.match(line))]
        if not keys:
            return True
        return keys[-1] <= self.last and keys.count(self.last) <= self.same


@dataclass
class Follower:
    """Follows one pod's container; `run` returns when its log is complete, or the pod is gone.

    Args:
        read_pod: a fresh reading of the pod, None if there is none by that name and uid.
        emit: receives the new lines of a chunk, in order, as bytes without newline.
        stop: set to end early.
    """

    api: Api
    namespace: str
    pod: Pod
    read_pod: Callable[[], Pod | None]
    emit: Callable[[list[bytes]], None]
    stop: threading.Event
    quiet_seconds: float = QUIET_SECONDS
    stitcher: Stitcher = field(default_factory=Stitcher)
    connections: int = 0
    complete: bool = False
    note: Callable[[str], None] = lambda _text: None
    _pause: float = 0.2
    _restarts: int = 0

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                if self._once():
                    return
            except Away as away:
                log.debug("log of %s: %s", self.pod.name, away)
                self._wait(away.retry_after)
            except Refused as refused:
                if refused.status == 404:
                    return  # the pod went between our reading and our request
                # 400 is a container that is about to start, or has just been removed; 401 and 403 may be a token
                # that is being renewed. The pod's own end, or the caller's `stop`, ends this loop.
                log.debug("log of %s: %s", self.pod.name, refused)
                self._wait(1.0)

    def _once(self) -> bool:
        """One connection. Returns whether the log is complete."""
        # 1. Read the pod before opening the log: only a container that had ended *then* can have been read whole.
        pod = self.read_pod()
        if pod is None:
            return True
        self.pod = pod
        if not pod.started:
            if pod.finished:  # evicted or refused before any container ran
                self.complete = True
                return True
            self._wait(1.0)
            return False
        if pod.restarts > self._restarts:
            self._read_previous(pod)
        ended = pod.terminated is not None
        # 2. Open. `sinceTime` travels in whole seconds, so up to one second comes again.
        rest = self._stream({"follow": "true"})
        self._pause = 0.2
        if rest is None:
            self._wait(1.0)  # 204: no node yet
            return False
        if not ended:
            return False  # a clean end may be a cut
        # 3. The container had ended, and the stream closed cleanly: that may still be a cut. Ask for the last lines.
        tail, unfinished = self._tail()
        if rest and rest == unfinished:
            self._take([rest])
            rest = b""
        if rest or not self.stitcher.complete([*tail, *([unfinished] if unfinished else [])]):
            return False
        if pod.finished or pod.phase != "Running":
            self.complete = True
            return True
        self._wait(1.0)  # the container will start again
        return False

    def _stream(self, extra: dict[str, str]) -> bytes | None:
        """Read one stream to its end; returns the unfinished last line, None if there was no log at all."""
        query = {"container": self.pod.container, "timestamps": "true", **extra}
        if self.stitcher.since:
            query["sinceTime"] = self.stitcher.since
        self.connections += 1
        gaps = self.stitcher.gaps
        response = self.api.open("GET", self._path(), query=query, read_seconds=self.quiet_seconds)
        try:
            if response.status == 204:
                return None
            self.stitcher.begin()
            rest = b""
            for data in self._chunks(response):
                head, newline, tail = data.rpartition(b"\n")
                if not newline:
                    rest += data
                    if len(rest) > MAX_LINE_BYTES:
                        self._take([rest])
                        rest = b""
                    continue
                self._take((rest + head).split(b"\n"))
                rest = tail
            if self.stitcher.gaps > gaps:
                self.note(
                    "the node rotated this log while the connection was cut: lines before this one may be missing"
                )
            return rest
        finally:
            # Never back into the pool: the rest of a cut or stopped stream would be the next request's answer.
            response.close()
            response.release_conn()

    def _chunks(self, response: Any) -> Iterator[bytes]:
        """What arrives, as it arrives. An abrupt end raises; a clean one may be a cut all the same."""
        from urllib3.exceptions import HTTPError

        try:
            for data in response.stream(CHUNK_BYTES, decode_content=False):
                if self.stop.is_set():
                    return
                yield data
        except (HTTPError, OSError, ValueError) as error:
            raise Away(f"stream broken: {type(error).__name__}") from error

    def _tail(self) -> tuple[list[bytes], bytes]:
        """The log's last lines, and what follows the last newline."""
        query = {"container": self.pod.container, "timestamps": "true", "tailLines": TAIL_LINES}
        response = self.api.open("GET", self._path(), query=query)
        try:
            data = bytes(response.data or b"")
        except Exception as error:
            raise Away(f"tail broken: {type(error).__name__}") from error
        finally:
            response.release_conn()
        *lines, unfinished = data.split(b"\n")
        return lines, unfinished

    def _read_previous(self, pod: Pod) -> None:
        """The rest of the container run that ended before this one; earlier runs are beyond reach."""
        if pod.restarts > self._restarts + 1:
            self.note(f"the container restarted {pod.restarts - self._restarts} times: only the last two logs are left")
        try:
            rest = self._stream({"previous": "true"})
            if rest:
                self._take([rest])
        except Refused as refused:
            if refused.status != 400:
                raise
        self._restarts = pod.restarts
        self.note(f"the container restarted (restart {pod.restarts})")

    def _take(self, lines: list[bytes]) -> None:
        new: list[bytes] = []
        self.stitcher.take(lines, new.append)
        if new:
            self.emit(new)

    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.pod.name}/log"

    def _wait(self, at_least: float) -> None:
        self.stop.wait(max(self._pause, min(at_least, 30.0)))
        self._pause = min(self._pause * 2, 5.0)
