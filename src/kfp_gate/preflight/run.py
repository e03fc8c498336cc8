"""Everything that can be known to fail later, tried before anything expensive starts.

One table of findings comes out, errors first; all groups of checks run, whatever the others found. Nothing is made
that a cached training depends on: what is written is probes, a tag, and files that are removed again.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from kfp_gate.preflight.checks import Check, error, guarded, markdown, raise_errors, text, without_secrets
from kfp_gate.preflight.criteria_checks import check_criteria, check_monitors, check_names
from kfp_gate.preflight.data_checks import check_listing, check_manifests, check_separation, read_all
from kfp_gate.preflight.model_checks import check_model
from kfp_gate.preflight.place_checks import check_images, check_machine, check_storage
from kfp_gate.preflight.request import PreflightRequest
from kfp_gate.preflight.tracking_checks import check_tracking

log = logging.getLogger(__name__)

ExtraCheck = Callable[[PreflightRequest], Sequence[Check]]
"""A further group of checks, for instance of the cluster that the training job will run on."""


def preflight(request: PreflightRequest, *, extra: Sequence[ExtraCheck] = (), table: Path | None = None) -> list[Check]:
    """Run all checks.

    Args:
        request: the pipeline that is about to run.
        extra: further groups of checks; an exception in one becomes a finding.
        table: file that the Markdown table is written to, before an error is raised.

    Returns:
        All findings.

    Raises:
        InvalidInput: at least one finding is an error; the message lists all of them.
    """
    checks = find_all(request, extra)
    if table is not None:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(markdown(checks), encoding="utf-8")
    log.info("checks before training:\n%s", text(checks))
    raise_errors(checks)
    return checks


def find_all(request: PreflightRequest, extra: Sequence[ExtraCheck] = ()) -> list[Check]:
    """The findings of `preflight`, without raising for errors among them."""
    manifests, checks = read_all({"train": request.train, "val": request.val, "test": request.test})
    checks += guarded(lambda: check_manifests(manifests), why="the pipeline cannot use this data set")
    if not request.model_uri:
        near = request.gate.near_duplicate_distance
        checks += guarded(lambda: check_separation(manifests, near), why="the gate would not judge the model")
    if set(manifests) == {"train", "val", "test"}:
        checks += guarded(lambda: check_listing(manifests), why="the pipeline would work on an outdated split")
    if "test" in manifests:
        test = manifests["test"]
        checks += guarded(lambda: check_criteria(request.gate, test), why="the gate cannot judge")
        checks += guarded(lambda: check_names(test.classes), why="metrics cannot be kept in MLflow")
    if "val" in manifests and not request.model_uri:
        val = manifests["val"]
        checks += guarded(lambda: check_monitors(request.monitors, val), why="training cannot choose its best epoch")
    checks += guarded(lambda: check_tracking(request), why="nothing could be tracked or registered")
    checks += guarded(lambda: check_storage(request), why="checkpoints could not be kept")
    checks += guarded(lambda: check_machine(request, manifests), why="the gate could not run here")
    checks += guarded(lambda: check_images(request), why="training and gate could not be compared")
    for group in extra:
        checks += _extra(group, request)
    # Last, since it takes seconds; the gate is tried only where nothing is known yet that would stop it.
    sound = not any(c.level == "error" for c in checks)
    checks += guarded(lambda: check_model(request, manifests, sound=sound), why="there would be nothing to judge")
    return [without_secrets(check) for check in checks]


def _extra(group: ExtraCheck, request: PreflightRequest) -> list[Check]:
    why = "the training job could not run"
    try:
        return guarded(lambda: group(request), why=why)
    except Exception as problem:
        name = getattr(group, "__name__", "a further check")
        return [error(f"{name} broke: {type(problem).__name__}: {problem}", why=why, cure="report it")]
