"""One bounded profile window of a training: after the warm-up of its first epoch, and never left on.

    settling | steps around | one step that warms the profiler | N profiled steps | settling | steps around

Inside, all at once: torch's profiler, NVTX ranges named after our phases and the start and stop of the CUDA profiler
(on a GPU), and cProfile in whichever process makes the batches. The steps around are what the profiled ones are
compared with, so that the profile says what it cost. Settling lasts as long as the stock of prepared batches, which
were made before the switch.

An instrument that fails costs its part of the profile, never the training. Nothing here changes a value.

The timeline gets one `profile` line:

    steps, step_s           profiled steps, and their median in seconds
    around_steps, around_s  the same of the steps around; cost: step_s / around_s - 1
    ops, kernels, top_kernels, device_busy_s        see `kfp_gate.training.op_trace.OpTimes`
    batches, transforms     batches that were made in the window; each part's share of the time that took
    functions               see `kfp_gate.observing.loader_profile.FunctionTimes.top`
    apart_s                 seconds between the steps in which training stood still for the instruments
    trace, nsys             file, relative to the timeline's folder; command, for a shell in the file's folder
    problems                instruments that failed, in words
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kfp_gate.observing.loader_profile import Flag, FunctionTimes
from kfp_gate.observing.loading import Made
from kfp_gate.observing.phases import OTHER, Phases
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.op_trace import TOP, OpTimes, OpTrace
from kfp_gate.training.step_spread import FEWEST_GROUPS, spread_of
from kfp_gate.training.window_plan import LEAD, WindowPlan

log = logging.getLogger(__name__)

FOLDER, TRACE = "profile", "trace.json.gz"

UNDER_NSYS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")
"""What Nsight Systems sets in the processes it starts. Only one of it and torch's profiler can listen to the device
(CUPTI has one subscriber), and there it is the one that was asked for."""


class ProfileWindow:
    """The window of one process. Call it at the joints of an epoch; it opens and closes by itself."""

    def __init__(
        self, steps: int, *, folder: Path, timeline: Timeline, phases: Phases, cuda: bool, flag: Flag | None,
        reproduce: Callable[[Path], str] | None = None,
    ) -> None:  # fmt: skip
        """Nothing runs yet.

        Args:
            steps: to profile; 0: this window never opens.
            folder: of this rank; the profile goes into its folder `profile`.
            timeline: gets the `profile` line.
            phases: the clock of the steps; its changes become NVTX ranges.
            cuda: whether the steps run on a GPU.
            flag: raised for the processes that make batches; None only where the window never opens.
            reproduce: writes into a folder what a run under Nsight Systems needs, and gives the command.
        """
        self.steps, self.folder, self.timeline, self.phases = steps, folder / FOLDER, timeline, phases
        self.cuda, self.flag, self.reproduce = cuda, flag, reproduce
        self.open = False
        """Whether the step that runs now, or comes next between two steps, is under the instruments."""
        self.due = False
        """Whether `turn` has something to do before the next step."""
        self._done = not steps
        self._plan: WindowPlan | None = None
        self._offset, self._group = 0, 1
        self._inside: list[float] = []
        self._around: list[float] = []
        self._trace: OpTrace | None = None
        self._ops: OpTimes | None = None
        self._written = ""
        self._functions = FunctionTimes()
        self._parts: dict[str, float] = {}
        self._problems: list[str] = []
        self._apart_s = 0.0

    def epoch_begins(self, length: int, *, skip: int, stock: int, workers: int) -> None:
        """The steps of an epoch begin.

        Args:
            length: of the epoch, in steps.
            skip: steps of it that are still warm-up.
            stock: batches that loader processes hold ready.
            workers: loader processes of this rank.
        """
        if self._done:
            return
        if self.open:
            self._stop()
        self._plan = WindowPlan.fit(length - skip, self.steps, stock)
        self._offset, self._group = -skip, max(1, workers)
        self._inside, self._around = [], []
        self.due = self._plan is not None and self._offset == self._plan.opens

    def step_done(self, seconds: float) -> None:
        """A step ended that took so long. Where it leaves something `due`, call `turn`."""
        plan = self._plan
        if self._done or plan is None:
            return
        if plan.opens + LEAD <= self._offset < plan.closes:
            self._inside.append(seconds)
        elif plan.settle <= self._offset < plan.opens or self._offset >= plan.closes + plan.settle:
            self._around.append(seconds)
        self._offset += 1
        if self.open and self._trace is not None and self._offset < plan.closes:
            self._try("torch.profiler", self._trace.step)
        self.due = self._offset in (plan.opens, plan.closes) or self._offset >= plan.total

    def turn(self) -> None:
        """Open, close or tell; takes from milliseconds to seconds, so it is no step's time."""
        plan, due, self.due = self._plan, self.due, False
        if not due or self._done or plan is None:
            return
        if self._offset == plan.opens:
            self._start()
        elif self._offset == plan.closes:
            self._stop()
        if self._offset >= plan.total:
            self._tell()

    def steps_end(self) -> None:
        """The steps of the epoch are over: whatever is open is closed."""
        self.due = False
        if self._done or self._plan is None:
            return
        if self.open:
            self._stop()
        if self._offset > self._plan.opens:
            self._tell()

    def take(self, made: Made | None) -> None:
        """The making of a batch that reached the trainer."""
        if self._done or made is None or not made.profile:
            return
        self._try("cProfile", lambda: self._functions.add(made.profile))
        for name, (wall, _cpu, _calls) in made.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + wall

    # Instruments ------------------------------------------------------------------------------------------------

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What the instruments need to start and stop is nobody's step."""
        began = time.perf_counter()
        with self.phases.during(OTHER):
            yield
        self._apart_s += time.perf_counter() - began

    def _start(self) -> None:
        assert self._plan is not None
        steps = self._plan.active
        log.info("profile: %d steps begin under the profiler", steps)
        with self._apart():
            self.open = True
            if self.flag is not None:
                self.flag.value = 1
            if not any(os.environ.get(name) for name in UNDER_NSYS):
                self._trace = self._try("torch.profiler", lambda: _started(steps, cuda=self.cuda))
            if self.cuda:
                self._try("NVTX", self._ranges_on)

    def _stop(self) -> None:
        trace, self._trace = self._trace, None
        with self._apart():
            self.open = False
            if self.flag is not None:
                self.flag.value = 0
            if self.cuda:
                self._try("NVTX", self._ranges_off)
            if trace is None:
                return
            self._try("torch.profiler", trace.stop)
            self._ops = self._try("torch.profiler", trace.times)
            self._try("the trace file", lambda: self._write(trace))

    def _write(self, trace: OpTrace) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace.write(self.folder / TRACE)
        self._written = f"{FOLDER}/{TRACE}"

    def _ranges_on(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(self.phases.current)
        self.phases.on_change = _next_range

    def _ranges_off(self) -> None:
        import torch

        if self.phases.on_change is not None:
            self.phases.on_change = None
            torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    def _try(self, what: str, do: Callable[[], Any]) -> Any:
        """Do it; whatever it raises costs only itself, and is said once."""
        try:
            return do()
        except Exception as error:
            # Of a file that fails without its place, which is nobody's business.
            said = (isinstance(error, OSError) and error.strerror) or str(error)
            text = f"{what}: {type(error).__name__}: {(said.splitlines() or [''])[0][:200]}"
            if text not in self._problems:
                self._problems.append(text)
                log.warning("profile: %s; training goes on", text)
            return None

    # Result -----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._done = True
        with self._apart():
            self._try("the profile line", self._write_line)
        self._functions, self._ops = FunctionTimes(), None

    def _write_line(self) -> None:
        # Both in groups of the same size: see `step_spread`.
        group = min([self._group, *(max(1, len(s) // FEWEST_GROUPS) for s in (self._inside, self._around) if s)])
        inside, around = spread_of(self._inside, group=group), spread_of(self._around, group=group)
        step, other = inside.median if inside else None, around.median if around else None
        cost = step / other - 1 if step is not None and other else None
        reproduce, folder = self.reproduce, self.folder
        command = self._try("the nsys command", lambda: reproduce(folder)) if reproduce is not None else None
        ops, whole = self._ops, sum(self._parts.values())
        shares = {n: round(s / whole, 4) for n, s in sorted(self._parts.items(), key=lambda p: -p[1])} if whole else {}
        self.timeline.write(
            "profile", steps=len(self._inside), step_s=_rounded(step), around_s=_rounded(other),
            around_steps=len(self._around), cost=_rounded(cost), ops=_short(ops.ops) if ops else None,
            kernels=ops.kernels if ops else None,
            top_kernels=_short(ops.top_kernels) if ops and ops.top_kernels is not None else None,
            device_busy_s=ops.device_busy_s if ops else None, transforms=shares, batches=self._functions.batches,
            functions=self._functions.top(TOP, self._parts), trace=self._written or None, nsys=command,
            problems=self._problems, apart_s=round(self._apart_s, 6),
        )  # fmt: skip
        text = f"profile: {len(self._inside)} steps under the profiler"
        if step is not None:
            text += f", {step:.4f} s each"
        if other is not None and cost is not None:
            text += f" against {other:.4f} s in the {len(self._around)} steps around: the instruments cost {cost:+.0%}"
            text += "" if inside and around and inside.low > around.high else ", within the spread"
        else:
            text += "; the epoch is too short to tell what the instruments cost"
        log.info("%s", text)
        if self._written:
            log.info("profile: trace in %s, for ui.perfetto.dev", self.folder / TRACE)
        if command:
            log.info("profile: to see more, in %s: %s", self.folder, command)


def _started(steps: int, *, cuda: bool) -> OpTrace:
    trace = OpTrace(steps, cuda=cuda)
    trace.start()
    return trace


def _next_range(phase: str) -> None:
    import torch

    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.range_push(phase)


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names of templated kernels fill pages."""
    return [{**row, "name": row["name"][:160]} for row in rows]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
