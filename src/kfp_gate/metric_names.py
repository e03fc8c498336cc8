r"""The one name of every metric, and its exact image in MLflow.

The canonical name is used in settings, in the gate and in errors:

    map50                               the whole set
    class/cone/map50                    one class
    size/small/recall                   one size band
    class/cone/size/small/recall        one class in one size band
    slice/weather=rain/map50            one slice: a column of the manifest and its value
    slice/weather=rain/class/cone/map50

Inside a class or slice a slash is written `\/` and a backslash `\\`, so that no two names collide.

MLflow allows letters, digits and `_ - . space : /` only, refuses path-like oddities (`.`, `..`, `//`, a
slash at an end), and one bad name refuses the whole batch. `to_mlflow` writes every other character as
`:hex:` (a colon itself as `:3a:`), which `from_mlflow` undoes: an injective pair. Colons come in pairs, so
that a key is read from left to right in one way only:

    `::`              a whole segment: an empty one
    `:28:`            the character U+0028
    `:_<16 hex>:`     in a shortened key, what was cut
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256

from kfp_gate.errors import InvalidInput

METRICS = {
    "map50": "average precision at IoU 0.50, mean over classes (COCO, 101 recall points)",
    "map75": "average precision at IoU 0.75, mean over classes",
    "map50_95": "average precision, mean over IoU 0.50:0.05:0.95 and classes",
    "precision": "share of detections that are right, at the stated confidence and IoU 0.50",
    "recall": "share of objects that are found, at the stated confidence and IoU 0.50",
    "f1": "harmonic mean of precision and recall",
    "mean_confidence": "mean score of the detections at or above the stated confidence",
    "abnormal_box_rate": "share of those detections that are degenerate, out of the image, duplicates, or absurd in "
    "size or shape against the training set (where the model tells of it)",
    "undetected_image_rate": "share of the images with objects on which nothing was found",
    "false_alarm_rate": "share of the images without objects on which something was found",
    "calibration_error": "expected calibration error of the scores (10 bins)",
}
"""Every metric a criterion or a monitor may name."""

SIZE_BANDS = ("small", "medium", "large")
"""COCO's: area below 32 squared, below 96 squared, above; in pixels of the original image."""

LOWER_IS_BETTER = frozenset({"abnormal_box_rate", "undetected_image_rate", "false_alarm_rate", "calibration_error"})

MLFLOW_NAME_LIMIT = 250
_WORD = re.compile(r"\w")
_TOKEN = re.compile(r":(?P<code>[0-9a-f]{1,6}):|:(?P<cut>_[0-9a-f]{16}):|(?P<plain>[^:])", re.DOTALL)


@dataclass(frozen=True)
class MetricName:
    """A parsed canonical name. `str()` gives the name back."""

    metric: str
    class_name: str | None = None
    size: str | None = None
    slice: str | None = None

    def __str__(self) -> str:
        parts = []
        if self.slice is not None:
            parts += ["slice", _escape(self.slice)]
        if self.class_name is not None:
            parts += ["class", _escape(self.class_name)]
        if self.size is not None:
            parts += ["size", self.size]
        return "/".join([*parts, self.metric])


def per_class(class_name: str, metric: str) -> str:
    """The canonical name of `metric` for one class.

    >>> per_class("cone", "map50")
    'class/cone/map50'
    """
    return str(MetricName(metric, class_name=class_name))


def parse(name: str, *, classes: Iterable[str] | None = None, where: str = "metric name") -> MetricName:
    """Read a canonical name.

    Args:
        name: for instance `class/cone/map50`.
        classes: the known classes; if given, an unknown class is refused with close matches.
        where: the parameter that the name came from, for the message.

    Raises:
        InvalidInput: the name is not canonical; the message shows close matches and never guesses.
    """
    known = None if classes is None else tuple(classes)
    parts = _split(name)
    metric, scope = parts[-1], parts[:-1]
    found: dict[str, str] = {}
    for i, keyword in enumerate(scope[::2]):
        if keyword not in ("slice", "class", "size") or keyword in found or 2 * i + 1 >= len(scope):
            raise _unknown(name, where, known)
        found[keyword] = scope[2 * i + 1]
    parsed = MetricName(metric, found.get("class"), found.get("size"), found.get("slice"))
    if metric not in METRICS or str(parsed) != name or parsed.size not in (None, *SIZE_BANDS):
        raise _unknown(name, where, known)
    if parsed.class_name is not None and known is not None and parsed.class_name not in known:
        raise _unknown(name, where, known)
    return parsed


def known_names(classes: Iterable[str] | None = None) -> list[str]:
    """All overall and per-class names, in a stable order."""
    return [*METRICS, *(per_class(c, m) for c in classes or () for m in METRICS)]


def to_mlflow(name: str) -> str:
    """The MLflow key of a canonical name: exact and injective, at most 250 characters.

    A longer key is cut in the middle, at a whole character, and a digest of the name stands for what was cut. Such a
    key cannot be decoded without `shortened` of `from_mlflow`, so the caller stores the raw name beside it.

    >>> to_mlflow("class/car (parked)/map50")
    'class/car :28:parked:29:/map50'
    """
    key = "/".join(_encode_segment(segment) for segment in name.split("/"))
    if len(key) <= MLFLOW_NAME_LIMIT:
        return key
    # The last segment is kept where it can be: it says which metric it is.
    digest = f":_{sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}:"
    last = "/" + key.rpartition("/")[2]
    end = digest + (last if len(last) <= 60 else "")
    room, start = MLFLOW_NAME_LIMIT - len(end), ""
    for character in name:
        piece = character if character == "/" else _encode(character)
        if len(start) + len(piece) > room or ((not start or start.endswith("/")) and character in "/."):
            # Also cut before a segment that only the whole name's encoding can write.
            break
        start += piece
    return start + end


def from_mlflow(key: str, shortened: Mapping[str, str] | None = None) -> str:
    """The canonical name of an MLflow key made by `to_mlflow`; `shortened` maps cut keys to raw names.

    Raises:
        InvalidInput: a cut key that `shortened` does not hold, or a key that `to_mlflow` does not make.
    """
    tokens = [_tokens(segment, key) for segment in key.split("/")]
    if any(token["cut"] for segment in tokens for token in segment):
        if shortened and key in shortened:
            return shortened[key]
        raise InvalidInput(
            f"metric key {key!r} was shortened", expected="its raw name in the run's name map", where="from_mlflow",
            next_step="read the name map artifact of the run and pass it as `shortened`",
        )  # fmt: skip
    name = "/".join(
        "".join(chr(int(t["code"], 16)) if t["code"] else t["plain"] for t in segment) for segment in tokens
    )
    if to_mlflow(name) != key:
        raise _foreign(key)
    return name


def _encode_segment(segment: str) -> str:
    if segment == "":
        return "::"
    # A segment of dots only would not survive MLflow's path normalisation.
    return "".join(f":{ord(c):x}:" for c in segment) if set(segment) == {"."} else _encode(segment)


def _tokens(segment: str, key: str) -> list[re.Match[str]]:
    """A segment's tokens from left to right; none for the empty segment `::`."""
    found: list[re.Match[str]] = []
    position = len(segment) if segment == "::" else 0
    while position < len(segment):
        token = _TOKEN.match(segment, position)
        if token is None or (token["code"] and int(token["code"], 16) > 0x10FFFF):
            raise _foreign(key)
        found.append(token)
        position = token.end()
    return found


def _encode(text: str) -> str:
    return "".join(c if _is_plain(c) else f":{ord(c):x}:" for c in text)


def _is_plain(character: str) -> bool:
    """Whether every MLflow server takes the character as it is.

    A server asks its own Python's `\\w`, and a Python older than this one knows fewer letters. So a letter
    counts that Unicode 3.2 of 2002 knew already; combining marks are no word characters and never count.
    """
    if character.isascii():
        return character.isalnum() or character in "_-. "
    return bool(_WORD.fullmatch(character)) and unicodedata.ucd_3_2_0.category(character) != "Cn"


def _foreign(key: str) -> InvalidInput:
    return InvalidInput(
        f"metric key {key!r}", expected="a key as kfp-gate writes it", where="from_mlflow",
        next_step="read it as it is: it was logged by something else",
    )  # fmt: skip


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("/", "\\/")


def _split(name: str) -> list[str]:
    parts, current, it = [], "", iter(name)
    for char in it:
        if char == "\\":
            current += next(it, "\\")
        elif char == "/":
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current]


def _unknown(name: str, where: str, classes: tuple[str, ...] | None) -> InvalidInput:
    close = suggestions(name, classes)
    return InvalidInput(
        f"unknown metric {name!r}",
        expected=f"one of {', '.join(METRICS)}; per class as class/<name>/<metric>",
        where=where,
        next_step=f"did you mean {' or '.join(map(repr, close))}?" if close else "choose a name from the list",
    )


def suggestions(name: str, classes: Iterable[str] | None = None, count: int = 3) -> list[str]:
    """Canonical names that somebody who wrote `name` may have meant, the closest first; for a message, never a guess.

    The scope of the name is kept: `class/cone/mAP50` suggests `class/cone/map50`, whether or not the classes are known.

    >>> suggestions("metrics/mAP50(B)")
    ['map50', 'map50_95', 'map75']
    """
    known = None if classes is None else tuple(classes)
    parts = _split(name)
    scope = dict(zip(parts[:-1:2], parts[1:-1:2], strict=False))
    metrics = _close_metrics(parts[-1], count)
    class_name = scope.get("class")
    names = [class_name]
    if class_name is not None and known is not None and class_name not in known:
        folded = {c.casefold(): c for c in known}
        names = [folded[c] for c in get_close_matches(class_name.casefold(), folded, n=count, cutoff=0.6)]
    size = scope.get("size")
    if size is not None and size not in SIZE_BANDS:
        size = next(iter(get_close_matches(size.casefold(), SIZE_BANDS, n=1, cutoff=0.5)), None)
    found = [
        str(MetricName(metric, class_name=one, size=size, slice=scope.get("slice")))
        for one in names
        for metric in metrics
    ]
    return found[:count]


def _close_metrics(text: str, count: int) -> list[str]:
    """Metrics close to a name in another spelling: other case, dashes, a prefix or suffix of Ultralytics."""
    plain = re.sub(r"\(\w*\)$", "", text.strip()).casefold().replace("-", "_").replace(" ", "_")
    plain = plain.replace("0.5:0.95", "50_95").replace("@", "").replace(":", "_").replace("ap_50", "ap50")
    if plain in METRICS:
        return [plain, *(m for m in get_close_matches(plain, METRICS, n=count, cutoff=0.5) if m != plain)]
    return get_close_matches(plain, METRICS, n=count, cutoff=0.5)
