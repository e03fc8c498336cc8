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
`:hex:` (a colon itself as `:3a:`), which `from_mlflow` undoes: an injective pair.
"""

import re
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
    "abnormal_box_rate": "share of those detections that are degenerate, out of the image, or duplicates",
    "undetected_image_rate": "share of the images with objects on which nothing was found",
    "false_alarm_rate": "share of the images without objects on which something was found",
    "calibration_error": "expected calibration error of the scores (10 bins)",
}
"""Every metric a criterion or a monitor may name."""

SIZE_BANDS = ("small", "medium", "large")
"""COCO's: area below 32 squared, below 96 squared, above; in pixels of the original image."""

LOWER_IS_BETTER = frozenset({"abnormal_box_rate", "undetected_image_rate", "false_alarm_rate", "calibration_error"})

MLFLOW_NAME_LIMIT = 250
_PLAIN = re.compile(r"[\w\-. /]")
_ESCAPE = re.compile(r":([0-9a-f]+):")


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
    parts = _split(name)
    metric, scope = parts[-1], parts[:-1]
    found: dict[str, str] = {}
    for i, keyword in enumerate(scope[::2]):
        if keyword not in ("slice", "class", "size") or keyword in found or 2 * i + 1 >= len(scope):
            raise _unknown(name, where, known_names(classes))
        found[keyword] = scope[2 * i + 1]
    parsed = MetricName(metric, found.get("class"), found.get("size"), found.get("slice"))
    if metric not in METRICS or str(parsed) != name or parsed.size not in (None, *SIZE_BANDS):
        raise _unknown(name, where, known_names(classes))
    if parsed.class_name is not None and classes is not None and parsed.class_name not in set(classes):
        raise _unknown(name, where, known_names(classes))
    return parsed


def known_names(classes: Iterable[str] | None = None) -> list[str]:
    """All overall and per-class names, in a stable order."""
    return [*METRICS, *(per_class(c, m) for c in classes or () for m in METRICS)]


def to_mlflow(name: str) -> str:
    """The MLflow key of a canonical name: exact and injective, at most 250 characters.

    A longer key is cut and ends in `:~<digest>`; such a key cannot be decoded without `shortened` of
    `from_mlflow`, so the caller stores the raw name beside it.

    >>> to_mlflow("class/car (parked)/map50")
    'class/car :28:parked:29:/map50'
    """
    segments = name.split("/")
    # An empty or dots-only segment would not survive MLflow's path normalisation.
    encoded = "/".join(
        "::" if s == "" else "".join(f":{ord(c):x}:" for c in s) if set(s) == {"."} else _encode(s) for s in segments
    )
    if len(encoded) <= MLFLOW_NAME_LIMIT:
        return encoded
    return f"{encoded[: MLFLOW_NAME_LIMIT - 18]}:~{sha256(name.encode()).hexdigest()[:16]}"


def from_mlflow(key: str, shortened: Mapping[str, str] | None = None) -> str:
    """The canonical name of an MLflow key made by `to_mlflow`; `shortened` maps cut keys to raw names."""
    if ":~" in key:
        if shortened and key in shortened:
            return shortened[key]
        raise InvalidInput(
            f"metric key {key!r} was shortened", expected="its raw name in the run's name map", where="from_mlflow",
            next_step="read the name map artifact of the run and pass it as `shortened`",
        )  # fmt: skip
    return "/".join("" if s == "::" else _ESCAPE.sub(lambda m: chr(int(m.group(1), 16)), s) for s in key.split("/"))


def _encode(segment: str) -> str:
    return "".join(c if _PLAIN.fullmatch(c) else f":{ord(c):x}:" for c in segment)


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


def _unknown(name: str, where: str, known: list[str]) -> InvalidInput:
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    return InvalidInput(
        f"unknown metric {name!r}",
        expected=f"one of {', '.join(METRICS)}; per class as class/<name>/<metric>",
        where=where,
        next_step=f"did you mean {' or '.join(map(repr, close))}?" if close else "choose a name from the list",
    )
