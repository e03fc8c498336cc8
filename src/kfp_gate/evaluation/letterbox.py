"""From a file to a fixed square, and from boxes in that square back to the image.

Upstream's rectangular batches make a metric depend on the batch size; a fixed square does not. The steps are those of
its square validation: the long side becomes the square's, bilinear, padded with grey 114 in the middle.
"""

from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import Broken

PADDING = 114


@dataclass(frozen=True)
class Placement:
    """Where an image of `width` x `height` pixels lies within the square."""

    width: int
    height: int
    left: int
    top: int
    scale_x: float
    scale_y: float

    def to_image(self, boxes: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n, 4) x1 y1 x2 y2 of the square, in pixels of the image; not clipped, rounded to float32.

        Rounded so that a stored evaluation, which keeps float32, gives the very same overlaps.
        """
        moved = boxes - np.array([self.left, self.top, self.left, self.top], np.float64)
        moved /= np.array([self.scale_x, self.scale_y, self.scale_x, self.scale_y])
        return moved.astype(np.float32).astype(np.float64)


def read_image(path: Path, digest: str | None = None) -> NDArray[np.uint8]:
    """(height, width, 3) blue, green, red; rotated as its EXIF says.

    Args:
        digest: the sha256 of the manifest; None does not check.

    Raises:
        Broken: the file vanished, changed, or is no readable image. Never a silent gap: images in equal images out.
    """
    import cv2

    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unusable(path, f"no readable file ({error.strerror or error})") from error
    if digest and (actual := sha256(data).hexdigest()) != digest:
        raise _unusable(path, f"a file with sha256 {actual[:12]}..., the manifest says {digest[:12]}...")
    image: Any = None
    if data:
        # imdecode, as imread cannot open names that are not in the locale's encoding.
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error as error:
            raise _unusable(path, f"{len(data)} bytes that the image reader refuses ({error.err})") from error
    if image is None:
        raise _unusable(path, f"{len(data)} bytes that are no image")
    found: NDArray[np.uint8] = image
    return found


def letterbox(image: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint8], Placement]:
    """The (3, size, size) red, green, blue square of an image, and where the image lies in it."""
    import cv2

    height, width = image.shape[:2]
    ratio = size / max(height, width)
    new_width, new_height = min(ceil(width * ratio), size), min(ceil(height * ratio), size)
    if (new_width, new_height) != (width, height):
        resized: Any = cv2.resize(image, (new_width, new_height), interpolation=cv2.INTER_LINEAR)
    else:
        resized = image
    left, top = round((size - new_width) / 2 - 0.1), round((size - new_height) / 2 - 0.1)
    square = np.full((3, size, size), PADDING, np.uint8)
    square[:, top : top + new_height, left : left + new_width] = resized[:, :, ::-1].transpose(2, 0, 1)
    return square, Placement(width, height, left, top, new_width / width, new_height / height)


def _unusable(path: Path, found: str) -> Broken:
    return Broken(
        found, expected="the image that the manifest lists", where=str(path),
        next_step="restore the file, or split the data set again if it changed on purpose",
    )  # fmt: skip
