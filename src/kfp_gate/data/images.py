"""Looks at every image once: does it decode, how large is it, which bytes, how does it look, when was it taken."""

import hashlib
import io
import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.data.annotations import Bools, Floats, Ints
from kfp_gate.data.progress import Meter, Reporter
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import MISSING, Store

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Image files by name; case does not matter."""

_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "AVIF", "JPEG2000", "PPM")
"""By content, whatever the name: what OpenCV decodes too, as training and gate will. Pillow knows more, among them
PostScript, which it hands to another program."""

_SIDE, _KEPT = 32, 8
_ROTATED = (5, 6, 7, 8)
_EXIF_ORIENTATION, _EXIF_IFD, _EXIF_TIME, _EXIF_SUBSECOND = 0x0112, 0x8769, 0x9003, 0x9291
_EXIF_MAKE, _EXIF_MODEL, _EXIF_SERIAL = 0x010F, 0x0110, 0xA431


@dataclass(frozen=True)
class ImageFacts:
    """One row per image, in the order asked for.

    Attributes:
        width, height: pixels as shown, that is after EXIF rotation, as OpenCV and Ultralytics load them, shape (n,).
        sha256: hex digest of the file, "" if it could not be read.
        phash: 64-bit perceptual hash, shape (n,).
        bytes: size of the file as read, shape (n,).
        taken: seconds since 1970 from EXIF DateTimeOriginal, NaN where absent, shape (n,).
        camera: EXIF make, model and serial number, "" where absent.
        errors: per image what prevented reading, "" if nothing.
    """

    width: Ints
    height: Ints
    sha256: list[str]
    phash: NDArray[np.uint64]
    bytes: Ints
    taken: Floats
    camera: list[str]
    errors: list[str]

    def keep(self, keep: Bools) -> "ImageFacts":
        """Only the images where `keep` (shape (n,)) is True."""
        if keep.all():
            return self
        rows = np.flatnonzero(keep).tolist()
        sha256, camera, errors = ([column[i] for i in rows] for column in (self.sha256, self.camera, self.errors))
        return ImageFacts(
            self.width[keep], self.height[keep], sha256, self.phash[keep], self.bytes[keep], self.taken[keep],
            camera, errors,
        )  # fmt: skip


def inspect_images(
    store: Store, images: Sequence[str], *, threads: int | None = None, reporter: Reporter | None = None
) -> ImageFacts:
    """Read and decode each image once. Memory holds at most two images per thread.

    Threads suffice: hashing, decoding and reading all release the interpreter lock.

    Args:
        threads: how many images are read at once; default two per usable core, 16 for a remote store.
    """
    if threads is None:
        threads = 16 if store.uri.startswith("s3://") else 2 * len(os.sched_getaffinity(0))
    meter = Meter("reading images", len(images), reporter)
    seen: list[_Seen] = []
    # Warnings on size and metadata: what matters is whether it decodes. Set here, not per image: filters are global.
    with warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        warnings.simplefilter("ignore")
        for facts in _in_order(pool, store, images, 2 * threads):
            seen.append(facts)
            meter.add()
    return ImageFacts(
        width=np.array([s.width for s in seen], np.int64),
        height=np.array([s.height for s in seen], np.int64),
        sha256=[s.sha256 for s in seen],
        phash=np.array([s.phash for s in seen], np.uint64),
        bytes=np.array([s.bytes for s in seen], np.int64),
        taken=np.array([s.taken for s in seen], np.float64),
        camera=[s.camera for s in seen],
        errors=[s.error for s in seen],
    )


def perceptual_hash(grey: NDArray[np.float64]) -> int:
    """The 64-bit DCT hash of a grey image of 32 x 32: one bit per low frequency, set where it exceeds the median.

    The definition is that of pHash (Zauner 2010, as in the package imagehash), with two changes that make it
    robust: the constant term is left out of the median, and a frequency below one grey level counts as zero, so
    that a blank image always hashes to 0 instead of to its noise.
    """
    values = (_DCT @ grey @ _DCT.T).ravel()
    values[np.abs(values) < _SIDE * _SIDE / 4] = 0.0  # the basis is not normalised: a pattern of one grey level
    bits = values > np.median(values[1:])
    bits[0] = False
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def _dct_matrix() -> NDArray[np.float64]:
    k, x = np.arange(_KEPT)[:, None], np.arange(_SIDE)[None, :]
    return np.asarray(np.cos(np.pi * k * (2 * x + 1) / (2 * _SIDE)), np.float64)


_DCT = _dct_matrix()


@dataclass(frozen=True, slots=True)
class _Seen:
    width: int = 0
    height: int = 0
    sha256: str = ""
    phash: int = 0
    bytes: int = 0
    taken: float = float("nan")
    camera: str = ""
    error: str = ""


def _in_order(pool: ThreadPoolExecutor, store: Store, images: Sequence[str], ahead: int) -> Iterator[_Seen]:
    """Results in order with a bounded number under way, so that a million images do not queue up as bytes."""
    todo = iter(images)
    queue: deque[Future[_Seen]] = deque(pool.submit(_look, store, image) for image in islice(todo, ahead))
    try:
        while queue:
            yield queue.popleft().result()
            queue.extend(pool.submit(_look, store, image) for image in islice(todo, 1))
    finally:
        for future in queue:
            future.cancel()


def _look(store: Store, image: str) -> _Seen:
    try:
        data = store.read(image)
    except InvalidInput as error:
        return _Seen(error=error.found)
    except ValueError:
        return _Seen(error=MISSING)  # a name that no file can have: with a zero, or with half a character
    return look_at(data)


def look_at(data: bytes) -> _Seen:
    """The facts of one encoded image; an image that does not decode completely is an `error`, not an exception."""
    from PIL import Image, UnidentifiedImageError

    digest = hashlib.sha256(data).hexdigest()
    if not data:
        return _Seen(sha256=digest, error="the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as opened:
            width, height = opened.size
            exif = exif_of(opened)
            if unusable := _only_pillow_reads(opened, data):
                return _Seen(sha256=digest, bytes=len(data), error=unusable)
            # JPEG can be decoded at a fraction of its size: 3x less work, and still every byte is read.
            opened.draft("L", (4 * _SIDE, 4 * _SIDE))
            grey = _small_grey(opened)
    except Exception as error:  # a broken file makes a decoder raise anything; all mean the same here
        text = str(error).replace("\n", " ")
        # ultralytics, where a process has imported it, makes Image.open ask for a HEIF plugin in this case.
        if isinstance(error, UnidentifiedImageError | ImportError):
            text = "not an image file that can be identified"
        return _Seen(sha256=digest, bytes=len(data), error=text or type(error).__name__)
    orientation = exif.get(_EXIF_ORIENTATION, 1)
    grey = _upright(grey, orientation)
    if orientation in _ROTATED:
        width, height = height, width
    taken, camera = _capture(exif)
    return _Seen(width, height, digest, perceptual_hash(grey), len(data), taken, camera)


@cache
def _formats() -> tuple[str, ...]:
    """Those of `_FORMATS` that this build of Pillow has: it refuses a list with a name that it does not know."""
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def exif_of(opened: Any) -> Any:
    """The EXIF of an image opened with Pillow, without the orientation that only Pillow knows of.

    It looks into XMP and the text chunks of old PNGs too, OpenCV and Ultralytics do not: such an image would be held to
    lie on its side, which training and gate do not see.
    """
    for key in ("xmp", "XML:com.adobe.xmp"):
        opened.info.pop(key, None)
    exif = opened.getexif()
    if "exif" not in opened.info and "Raw profile type exif" in opened.info:
        exif.pop(_EXIF_ORIENTATION, None)
    return exif


def _only_pillow_reads(opened: Any, data: bytes) -> str:
    """What OpenCV refuses although Pillow takes it, "" if nothing. Found here, not by the gate after the training."""
    if opened.format == "TIFF" and opened.mode in ("F", "I"):
        return "a TIFF of 32-bit samples, which OpenCV cannot read"
    if opened.format == "TIFF" and opened.info.get("compression") in ("zstd", "lzma"):
        return f"a TIFF compressed with {opened.info['compression']}, which OpenCV cannot read"
    if opened.format == "PNG" and b"IEND" not in data:
        return "the PNG ends before its last chunk"
    return ""


def _small_grey(opened: Any) -> Floats:
    """The image as grey levels 0..255, shape (32, 32)."""
    from PIL import Image

    if opened.mode[0] not in "IF":
        return np.asarray(opened.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX), np.float64)
    # 16-bit and float images have their own range; Pillow's conversion to 8 bits would cut it off.
    deep = np.asarray(opened.convert("F").resize((_SIDE, _SIDE), Image.Resampling.BOX), np.float64)
    low, high = float(deep.min()), float(deep.max())
    return (deep - low) * (255.0 / (high - low)) if high > low else np.zeros_like(deep)


def _upright(grey: Floats, orientation: int) -> Floats:
    if orientation in (2, 4, 5, 7):
        grey = grey[:, ::-1] if orientation in (2, 5, 7) else grey[::-1]
    turns = {3: 2, 5: 1, 6: 3, 7: 3, 8: 1}.get(orientation, 0)
    return np.rot90(grey, turns)


def _capture(exif: Any) -> tuple[float, str]:
    """Capture time in seconds and camera name; NaN and "" where the file does not say or says nonsense."""
    details = exif.get_ifd(_EXIF_IFD)
    names = (exif.get(_EXIF_MAKE), exif.get(_EXIF_MODEL), details.get(_EXIF_SERIAL))
    camera = " ".join(str(v).strip("\0 ") for v in names if v)
    text = str(details.get(_EXIF_TIME, "")).strip("\0 ")
    try:
        # The zone is rarely known; one zone for all keeps the gaps right, which is all that is used.
        seconds = datetime.strptime(text, "%Y:%m:%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        fraction = str(details.get(_EXIF_SUBSECOND, "")).strip("\0 ")
        return seconds + (float(f"0.{fraction}") if fraction.isdigit() else 0.0), camera
    except ValueError:
        return float("nan"), camera
