"""Numbers as people read them. None is "unknown", never a zero."""

from collections.abc import Callable

UNKNOWN = "unknown"


def duration(seconds: float | None) -> str:
    """Seconds for people.

    >>> [duration(s) for s in (None, 0, 0.0042, 0.25, 12.34, 70, 150, 3600, 57600, 200000)]
    ['unknown', '0 s', '4.2 ms', '250 ms', '12.3 s', '70 s', '2 min 30 s', '1 h', '16 h', '2 d 8 h']
    """
    if seconds is None:
        return UNKNOWN
    if abs(seconds) < 1e-6:
        return "0 s"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    for unit, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit:
            whole, rest = divmod(round(seconds / part) * part, unit)
            return f"{whole} {name}" + (f" {rest // part} {part_name}" if rest >= part else "")
    return f"{seconds:.0f} s"


def interval(low: float | None, high: float | None, text: Callable[[float | None], str] = duration) -> str:
    """An interval for people, with the unit once where it is the same.

    >>> interval(0.139, 0.143), interval(0.9, 1.2), interval(126, 126.2), interval(2 << 20, 5 << 20, size)
    ('139 to 143 ms', '900 ms to 1.2 s', '2 min 6 s', '2.0 to 5.0 MiB')
    """
    first, second = text(low), text(high)
    if first == second:
        return first
    (number, _, unit), (_, _, other) = first.partition(" "), second.partition(" ")
    return f"{number} to {second}" if unit == other and " " not in unit else f"{first} to {second}"


def share(value: float | None) -> str:
    """A share for people.

    >>> [share(v) for v in (None, 0.0, 0.0004, 0.004, 0.543, 1.0)]
    ['unknown', '0%', 'below 0.1%', '0.4%', '54%', '100%']
    """
    if value is None:
        return UNKNOWN
    if 0 < value < 0.001:
        return "below 0.1%"
    return f"{value:.1%}" if 0 < value < 0.0095 else f"{value:.0%}"


def size(value: float | None) -> str:
    """Bytes for people.

    >>> [size(v) for v in (None, 0, 900, 5000, 3 << 20, 5 << 30, -(3 << 20))]
    ['unknown', '0 B', '900 B', '4.9 KiB', '3.0 MiB', '5.0 GiB', '-3.0 MiB']
    """
    if value is None:
        return UNKNOWN
    if value < 0:
        return f"-{size(-value)}"
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            amount = value / (1 << power)
            return f"{amount:.1f} {unit}" if amount < 99.95 else f"{amount:,.0f} {unit}"
    return f"{value:.0f} B"


def rate(value: float | None) -> str:
    """Bytes a second for people."""
    return UNKNOWN if value is None else f"{size(value)}/s"


def cores(value: float | None) -> str:
    """Processor cores for people.

    >>> cores(0.254), cores(1), cores(None)
    ('0.25 cores', '1 core', 'unknown')
    """
    if value is None:
        return UNKNOWN
    amount = f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
    return f"{amount} core{'' if amount == '1' else 's'}"
