"""The model that training starts from, or that is judged, and the gate's whole path tried with it."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from kfp_gate.data.manifest import Manifest
from kfp_gate.errors import KfpGateError
from kfp_gate.preflight.checks import Check, from_error, ok
from kfp_gate.preflight.gate_path import try_gate
from kfp_gate.preflight.request import PreflightRequest
from kfp_gate.registry.fetch import fetch_model


def check_model(request: PreflightRequest, manifests: Mapping[str, Manifest], *, sound: bool) -> list[Check]:
    """Whether the base model, or the model to judge, is there and can be read, and whether the gate can run at all.

    Args:
        sound: whether no other check found an error.
    """
    checks = _readable(request)
    # Only on sound input: it takes seconds, and would repeat what the other checks found.
    # A model that exists is judged right after this step: there is no training that could be lost.
    if sound and request.try_images and not request.model_uri and checks[0].level == "ok":
        checks += try_gate(
            request.base_model, manifests["train"], request.gate, image_size=request.image_size, batch=request.batch,
            count=request.try_images,
        )  # fmt: skip
    return checks


def _readable(request: PreflightRequest) -> list[Check]:
    with TemporaryDirectory(prefix="kfp-gate-") as folder:
        try:
            if request.model_uri:
                fetch_model(request.model_uri, Path(folder, "model"), tracking_uri=request.tracking_uri)
                return [ok(f"the model to judge can be read: {request.model_uri}")]
            from kfp_gate.training.base_model import resolve

            resolve(request.base_model, Path(folder))
            return [ok(f"the base model can be read: {request.base_model}")]
        except KfpGateError as problem:
            return from_error(problem, why="there would be no model to train or to judge")
