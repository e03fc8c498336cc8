"""Which steps of an epoch a profile window takes; see `kfp_gate.training.profiling`."""

from dataclasses import dataclass

LEAD = 1
"""Steps in which the profiler runs and is not listened to: its first step pays for its start."""

MOST_AROUND, FEWEST_AROUND = 30, 5


@dataclass(frozen=True)
class WindowPlan:
    """Numbers of steps: of settling and around, on each side, and of the window."""

    settle: int
    around: int
    active: int

    @classmethod
    def full(cls, steps: int, stock: int) -> "WindowPlan":
        """With all the room it wants; `stock` is the number of batches that loader processes hold ready."""
        return cls(stock, min(max(steps, FEWEST_AROUND), MOST_AROUND), steps)

    @classmethod
    def fit(cls, left: int, steps: int, stock: int) -> "WindowPlan | None":
        """Into `left` steps: first settling goes, then steps around, then the window; None if nothing is left."""
        if left <= LEAD:
            return None
        wanted = cls.full(steps, stock)
        active = min(steps, max(1, left - LEAD - 2))
        spare = left - LEAD - active
        around = min(FEWEST_AROUND, spare // 2)
        settle = min(wanted.settle, (spare - 2 * around) // 2)
        return cls(settle, min(wanted.around, (spare - 2 * settle) // 2), active)

    @property
    def after_warm_up(self) -> int:
        """Steps that it needs where a long warm-up has used up the stock already."""
        return self.total - self.settle

    @property
    def opens(self) -> int:
        """The step that comes first under the instruments."""
        return self.settle + self.around

    @property
    def closes(self) -> int:
        """The first step without them again."""
        return self.opens + LEAD + self.active

    @property
    def total(self) -> int:
        return self.closes + self.settle + self.around
