"""Finds the file that an annotation means by an image's name."""

import posixpath
from collections.abc import Iterable

from kfp_gate.data.images import SUFFIXES


class ImagePaths:
    """The image files of a listing, found by full path, by path from the annotation's folder, or by a unique end."""

    def __init__(self, listing: Iterable[str]) -> None:
        self.images = {k for k in listing if k.lower().endswith(SUFFIXES)}
        self._by_name: dict[str, list[str]] = {}
        for image in sorted(self.images):
            self._by_name.setdefault(image.rpartition("/")[2], []).append(image)

    def find(self, name: str, annotation_file: str) -> tuple[str, str]:
        """The image's path and "", or "" and why there is none.

        Args:
            name: as written in the annotation, relative to something.
            annotation_file: where it was written; its folder and name decide between several candidates.
        """
        name = name.replace("\\", "/").lstrip("/").removeprefix("./")
        for candidate in (posixpath.join(posixpath.dirname(annotation_file), name), name):
            if posixpath.normpath(candidate) in self.images:
                return posixpath.normpath(candidate), ""
        ends = [i for i in self._by_name.get(name.rpartition("/")[2], []) if ("/" + i).endswith("/" + name)]
        if not ends:
            return "", "no such file in the dataset"
        if len(ends) > 1:
            # train2017/1.jpg for annotations/instances_train2017.json, although val2017 has a 1.jpg too
            named = [i for i in ends if any(p in annotation_file for p in i.split("/")[:-1] if len(p) > 2)]
            ends = named if len(named) == 1 else ends
        if len(ends) > 1:
            return "", f"{len(ends)} files fit, such as {ends[0]!r} and {ends[1]!r}"
        return ends[0], ""

    def by_stem(self, annotation_file: str, folders: Iterable[str]) -> str:
        """The image with the stem of an annotation file in one of the folders, "" if none."""
        stem = posixpath.splitext(posixpath.basename(annotation_file))[0]
        for folder in folders:
            for suffix in SUFFIXES:
                for one in (suffix, suffix.upper()):
                    path = posixpath.normpath(posixpath.join(folder, stem + one))
                    if path in self.images:
                        return path
        return ""
