"""A read-only file system that shows a folder, slowly: a FUSE server without a library (Linux fuse(4), fuse.h 7.31).

    python slow_files.py SOURCE MOUNT [--bytes-per-s N] [--open-s S]

All reads share one stream of `bytes-per-s`, as on a saturated disk or network share; every open costs `open-s`, as
where a metadata server answers, but opens run side by side. Prints "ready" once mounted; ends when it is unmounted.
Nothing is kept in the page cache from one open to the next.
"""

import argparse
import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 5, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 34, 38, 42
SILENT = (FORGET, BATCH_FORGET)
"""Requests that get no reply."""

THREADS = 8
DETACH = 2


class SlowFiles:
    """Answers the kernel's requests for one mount."""

    def __init__(self, source: Path, descriptor: int, *, bytes_per_s: float, open_s: float) -> None:
        self.descriptor, self.bytes_per_s, self.open_s = descriptor, bytes_per_s, open_s
        self.paths: dict[int, str] = {1: str(source)}
        self.numbers: dict[str, int] = {str(source): 1}
        self.lock, self.stream = threading.Lock(), threading.Lock()
        self.free_at = 0.0

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.descriptor, 1 << 18)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # ENODEV: unmounted
            _, code, unique, node, *_ = struct.unpack_from("<IIQQIIIHH", request)
            if code in SILENT:
                continue
            try:
                body, problem = self.answer(code, node, request[40:]), 0
            except OSError as error:
                body, problem = b"", -(error.errno or errno.EIO)
            try:
                os.write(self.descriptor, struct.pack("<IiQ", 16 + len(body), problem, unique) + body)
            except OSError:
                if code == DESTROY:
                    return

    def answer(self, code: int, node: int, body: bytes) -> bytes:
        if code == INIT:
            major, minor, ahead, _ = struct.unpack_from("<IIII", body)
            flags = 1  # FUSE_ASYNC_READ: who reads then waits for the page, in state D, as with a disk or NFS
            return struct.pack("<IIIIHHIIHHI28x", major, min(minor, 31), ahead, flags, 12, 9, 1 << 16, 1, 0, 0, 0)
        if code == LOOKUP:
            path = self.paths[node] + "/" + os.fsdecode(body.rstrip(b"\0"))
            found = os.lstat(path)
            return struct.pack("<QQQQII", self.number(path), 0, 60, 60, 0, 0) + attributes(found)
        if code == GETATTR:
            return struct.pack("<QII", 60, 0, 0) + attributes(os.lstat(self.paths[node]))
        if code == READLINK:
            return os.fsencode(Path(self.paths[node]).readlink())
        if code == OPEN:
            time.sleep(self.open_s)
            return struct.pack("<QIi", os.open(self.paths[node], os.O_RDONLY), 0, 0)
        if code == READ:
            handle, offset, size = struct.unpack_from("<QQI", body)
            data = os.pread(handle, size, offset)
            self.pay(len(data))
            return data
        if code == RELEASE:
            os.close(struct.unpack_from("<Q", body)[0])
            return b""
        if code == OPENDIR:
            return struct.pack("<QIi", 0, 0, 0)
        if code == READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self.entries(self.paths[node], offset, size)
        if code == STATFS:
            return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        if code in (RELEASEDIR, FLUSH, ACCESS, DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "not supported")

    def number(self, path: str) -> int:
        with self.lock:
            if path not in self.numbers:
                self.numbers[path] = len(self.numbers) + 1
                self.paths[self.numbers[path]] = path
            return self.numbers[path]

    def pay(self, size: int) -> None:
        """Wait for this read's turn in the one stream."""
        if not self.bytes_per_s:
            return
        with self.stream:
            now = time.monotonic()
            self.free_at = max(self.free_at, now) + size / self.bytes_per_s
            until = self.free_at
        time.sleep(max(0.0, until - now))

    def entries(self, path: str, offset: int, size: int) -> bytes:
        found = b""
        for position, entry in enumerate(sorted(os.scandir(path), key=lambda e: e.name), start=1):
            if position <= offset:
                continue
            name = os.fsencode(entry.name)
            kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
            one = struct.pack("<QQII", entry.inode(), position, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found


def attributes(found: os.stat_result) -> bytes:
    return struct.pack(
        "<QQQQQQIIIIIIIIII", found.st_ino, found.st_size, found.st_blocks, int(found.st_atime), int(found.st_mtime),
        int(found.st_ctime), 0, 0, 0, found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
    )  # fmt: skip


def mount(point: Path) -> int:
    """Mount a FUSE file system and return the descriptor on which its requests come."""
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    library = ctypes.CDLL(None, use_errno=True)
    # MS_RDONLY | MS_NOSUID | MS_NODEV
    if library.mount(b"kfp-gate-slow", os.fsencode(point), b"fuse", 1 | 2 | 4, options.encode()):
        problem = ctypes.get_errno()
        os.close(descriptor)
        raise OSError(problem, os.strerror(problem), str(point))
    return descriptor


def unmount(point: Path) -> None:
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(point), DETACH)


@contextmanager
def slow_files(source: Path, point: Path, *, bytes_per_s: float = 0, open_s: float = 0) -> Iterator[Path]:
    """Show `source` at `point` while the block runs.

    Raises:
        OSError: no FUSE here, or not the right to mount.
    """
    point.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, __file__, str(source), str(point), f"--bytes-per-s={bytes_per_s}", f"--open-s={open_s}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None and server.stderr is not None
        if server.stdout.readline() != "ready\n":
            raise OSError(errno.ENODEV, server.stderr.read().strip().rpartition("\n")[2])
        yield point
    finally:
        unmount(point)
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--bytes-per-s", type=float, default=0)
    parser.add_argument("--open-s", type=float, default=0)
    options = parser.parse_args()
    descriptor = mount(options.mount)
    files = SlowFiles(options.source.resolve(), descriptor, bytes_per_s=options.bytes_per_s, open_s=options.open_s)
    threads = [threading.Thread(target=files.serve, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
