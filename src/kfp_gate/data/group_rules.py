"""Group rules: which images belong together, so that no split divides them. Written `rule+rule`, joined as a union."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kfp_gate.data.annotations import SPLITS
from kfp_gate.errors import InvalidInput

RULES = {
    "auto": "by the structure of file names, where it is evident, and near-duplicates:4",
    "none": "each image on its own",
    "folder": "by folder",
    "prefix": "prefix:TEXT: by the part of the file name before TEXT",
    "regex": "regex:PATTERN: by what the pattern's groups capture in the path",
    "csv": "csv:FILE:COLUMN: by a column of a table with one row per image",
    "exif": "exif:SECONDS: by gaps of more than SECONDS between captures of one camera",
    "near-duplicates": "near-duplicates:DISTANCE: images whose perceptual hashes differ in at most DISTANCE bits",
}
"""Every rule and what it does."""

NEAR_DISTANCE = 4
"""Bits of 64 within which images count as near-duplicates unless a rule says otherwise; the gate looks as far."""

MAX_DISTANCE = 16
"""Bits of 64. Unrelated images differ in about 32; above 16 a union would join whole datasets."""

_NEEDS_ARGUMENT = {"prefix": "prefix:__", "regex": "regex:^([^_]+)_", "csv": "csv:groups.csv:site", "exif": "exif:60"}
_JOINT = re.compile(rf"\+(?=(?:{'|'.join(RULES)})(?:$|[:+]))")
_NOT_A_GROUP = {*SPLITS, "images", "valid", "validation", "training", "testing", "jpegimages"}

_ROBOFLOW = re.compile(r"^(.+)\.rf\.[0-9a-zA-Z]{16,}$")
_FRAME = re.compile(r"^(.+?)[ _.-]*frame[ _.-]*\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Rule:
    """One parsed rule. `str()` gives its text back."""

    kind: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Read a group rule.

    >>> [str(r) for r in parse_rules("regex:^(a+)_+near-duplicates:4")]
    ['regex:^(a+)_', 'near-duplicates:4']

    `auto` stands for itself and `near-duplicates:4`: the gate does not run on a test set with near-duplicates of what
    the model was trained on, so a default that left them apart would end there.

    Raises:
        InvalidInput: an unknown rule, a missing or unusable argument.
    """
    rules = tuple(_parse_one(part) for part in _JOINT.split(text))
    kinds = [rule.kind for rule in rules]
    if "auto" in kinds and "near-duplicates" not in kinds:
        rules += (Rule("near-duplicates", str(NEAR_DISTANCE)),)
    return rules


def _parse_one(part: str) -> Rule:
    kind, _, argument = part.partition(":")
    if kind not in RULES:
        raise _bad(f"group rule {part!r}", "one of " + "; ".join(f"{k} ({v})" for k, v in RULES.items()))
    if kind in _NEEDS_ARGUMENT and not argument:
        raise _bad(f"group rule {part!r} without its argument", f"for instance {_NEEDS_ARGUMENT[kind]!r}")
    if kind in ("auto", "none", "folder") and argument:
        raise _bad(f"group rule {part!r}", f"{kind!r} without an argument")
    if kind == "regex":
        try:
            groups = re.compile(argument).groups
        except re.error as error:
            raise _bad(f"pattern {argument!r}: {error}", "a regular expression of Python") from None
        if not groups:
            raise _bad(f"pattern {argument!r} captures nothing", "a part in brackets, which becomes the group's name")
    if kind == "csv" and not all(argument.rpartition(":")[::2]):
        raise _bad(f"group rule {part!r}", "csv:FILE:COLUMN")
    if kind == "exif" and not _positive(argument):
        raise _bad(f"group rule {part!r}", "a number of seconds above 0, for instance 'exif:60'")
    if kind == "near-duplicates":
        argument = argument or str(NEAR_DISTANCE)
        if not (argument.isascii() and argument.isdigit()) or int(argument) > MAX_DISTANCE:
            raise _bad(f"group rule {part!r}", f"a distance from 0 to {MAX_DISTANCE} bits")
    return Rule(kind, argument)


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _bad(found: str, expected: str) -> InvalidInput:
    return InvalidInput(found, expected=expected, where="group_rule", next_step="correct the rule")


def name_keys(rule: Rule, images: Sequence[str]) -> list[str]:
    """Group key of each image by a rule that needs only its path; "" where the rule finds none.

    A key depends on nothing but the image's own path: adding, removing or renaming other images changes no key.
    """
    find: Callable[[str], str]
    if rule.kind == "auto":
        find = evident_group
    elif rule.kind == "folder":
        find = _folder
    elif rule.kind == "prefix":

        def find(image: str) -> str:
            stem, found, _ = image.rpartition("/")[2].partition(rule.argument)
            return f"name:{stem}" if found else ""

    elif rule.kind == "regex":
        pattern = re.compile(rule.argument)

        def find(image: str) -> str:
            match = pattern.search(image)
            return "name:" + "/".join(g or "" for g in match.groups()) if match and any(match.groups()) else ""

    else:
        return [""] * len(images)
    return [find(image) for image in images]


def evident_group(image: str) -> str:
    """The group that a file name states, "" if it states none.

    >>> evident_group("images/yell-a__0400_1200.jpg"), evident_group("clip7_frame_0012.png")
    ('name:yell-a', 'name:clip7')
    >>> evident_group("cat_jpg.rf.0123456789abcdef0123456789abcdef.jpg"), evident_group("IMG_0001.jpg")
    ('name:cat_jpg', '')
    """
    stem = image.rpartition("/")[2].rpartition(".")[0]
    copy = _ROBOFLOW.match(stem)
    if copy:
        stem = copy[1].removesuffix("_jpg").removesuffix("_png").removesuffix("_jpeg") if "__" in stem else copy[1]
    before, found, _ = stem.partition("__")
    if found and before:
        return f"name:{before}"
    frame = _FRAME.match(re.sub(r"_(jpe?g|png|bmp)$", "", stem))
    if frame:
        return f"name:{frame[1]}"
    return f"name:{stem}" if copy else ""


def _folder(image: str) -> str:
    """The folder without `images` and the names of splits: the same site in two split folders is one group."""
    parts = [p for p in image.split("/")[:-1] if p.lower() not in _NOT_A_GROUP]
    return "folder:" + ("/".join(parts) or ".")
