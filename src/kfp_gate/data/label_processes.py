"""Label files of a mounted dataset, read and parsed on every core.

Separate programs and not `multiprocessing`: that would import the caller's main module again in each worker, which
breaks scripts without a guard, notebooks and steps. A worker is this module, run as a program; it gets lists of files
on its input and answers with parsed columns.
"""

import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kfp_gate.data.label_text import ParsedLabels, parse_labels
from kfp_gate.data.progress import Meter
from kfp_gate.errors import Broken, KfpGateError
from kfp_gate.storage import LocalStore

log = logging.getLogger(__name__)

CHUNK = 4096
"""Files per request: large enough that starting a request costs nothing, small enough to bound memory."""

WORTHWHILE = 30_000
"""Below this many files the workers' start (half a second each) costs more than it saves."""

_LENGTH = struct.Struct(">Q")


def parse_files(root: Path, files: Sequence[str], meter: Meter, *, workers: int | None = None) -> list[ParsedLabels]:
    """Parsed labels of `files` (relative to `root`; "" is an image without labels), in chunks, in order.

    Args:
        workers: processes; default one per usable core, 0 to parse in this process.

    Raises:
        InvalidInput: a file cannot be read.
        Broken: a worker died.
    """
    if workers is None:
        cores = len(os.sched_getaffinity(0))
        workers = cores if len(files) >= WORTHWHILE and cores > 1 else 0
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    if not workers:
        store = LocalStore(root)
        results = []
        for chunk in chunks:
            results.append(_parse(store, chunk))
            meter.add(len(chunk))
        return results
    return _Pool(root, chunks, meter).run(min(workers, len(chunks)))


def _parse(store: LocalStore, files: Sequence[str]) -> ParsedLabels:
    return parse_labels([store.read(name) if name else b"" for name in files])


class _Pool:
    def __init__(self, root: Path, chunks: list[Sequence[str]], meter: Meter) -> None:
        self.root, self.chunks, self.meter = root, chunks, meter
        self.results: list[ParsedLabels | None] = [None] * len(chunks)
        self.lock, self.next = threading.Lock(), 0
        self.errors: list[Exception] = []

    def run(self, workers: int) -> list[ParsedLabels]:
        threads = [threading.Thread(target=self._drive, daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return [r for r in self.results if r is not None]

    def _drive(self) -> None:
        # -P: the current folder must not shadow a module of the worker
        command = [sys.executable, "-P", "-m", "kfp_gate.data.label_processes", str(self.root)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        try:
            while not self.errors:
                with self.lock:
                    index = self.next
                    self.next += 1
                if index >= len(self.chunks):
                    break
                _send(process.stdin, list(self.chunks[index]))
                answer = _receive(process.stdout)
                if isinstance(answer, Exception):
                    raise answer
                self.results[index] = answer
                with self.lock:
                    self.meter.add(len(self.chunks[index]))
        except KfpGateError as error:
            self.errors.append(error)
        except (OSError, EOFError) as error:
            found = f"a label reader ended with status {process.poll()}: {error}"
            next_step = "look for a kill by the memory limit, and run again"
            where = f"reading labels under {self.root}"
            self.errors.append(Broken(found, expected="an answer", where=where, next_step=next_step))
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait()


def _send(stream: BinaryIO | Any, value: Any) -> None:
    data = pickle.dumps(value, protocol=5)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the stream ended")
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError("the stream ended within an answer")
    # Only ever what the program at the other end of this pipe, ours, has written.
    return pickle.loads(data)  # noqa: S301 - see above


def main() -> None:
    """Answer requests until the input ends."""
    store = LocalStore(Path(sys.argv[1]))
    answers = sys.stdout.buffer
    while True:
        try:
            files = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _send(answers, _parse(store, files))
        except KfpGateError as error:
            _send(answers, error)


if __name__ == "__main__":
    main()
