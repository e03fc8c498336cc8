"""A run as its ranks recorded it: the lines of their timelines, and the training record if it was kept."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What is known of one training.

    Attributes:
        where: as the user named it.
        ranks: rank to its lines, in the order in which they were written. Lines of earlier attempts come first.
        record: record.json of rank 0; empty if it was not kept.
    """

    where: str
    ranks: Mapping[int, Sequence[Line]]
    record: Mapping[str, Any] = field(default_factory=dict)

    def lines(self, kind: str, rank: int = 0) -> Iterator[Line]:
        """The lines of one kind of one rank."""
        return (line for line in self.ranks.get(rank, ()) if line.get("kind") == kind)

    @property
    def running(self) -> bool:
        """Whether rank 0 has neither ended nor failed."""
        kinds = [line.get("kind") for line in self.ranks.get(0, ())]
        return "end" not in kinds and "failure" not in kinds

    @property
    def conditions(self) -> Line:
        """What rank 0 ran under; empty if its timeline does not say."""
        return next(iter(reversed(list(self.lines("conditions")))), {})
