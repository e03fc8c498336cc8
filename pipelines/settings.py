"""What every task of a pipeline gets: image, resources, credentials, volumes, the run's id."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kfp import dsl, kubernetes
from kfp.dsl.base_component import BaseComponent

from kfp_gate.images.names import reference

Function = TypeVar("Function", bound=Callable[..., Any])

SECRET_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "KFP_GATE_TRACKING_HOSTS",
    "KFP_GATE_WEBHOOK",
)
"""Keys of the credentials Secret; each present one becomes the environment variable of the same name."""


@dataclass(frozen=True)
class CompileOptions:
    """What is fixed when a pipeline is compiled, because KFP takes no parameter for it.

    Attributes:
        registry: where the component images are pulled from; empty: where they were pushed, else `kfp-gate`.
        secret: name of the Secret with the credentials; it may be missing on the cluster.
        mounts: PersistentVolumeClaims as `claim:/path`, mounted into every step that reads data.
        gpu: resource name of a GPU.
        gate_gpus: GPUs of the gate and of preflight, which tries the gate's image; 0 judges on the CPU.
    """

    registry: str = ""
    secret: str = "kfp-gate-credentials"  # noqa: S105  # the name of a Secret, not a secret
    mounts: tuple[str, ...] = ()
    gpu: str = "nvidia.com/gpu"
    gate_gpus: int = 1


def configure(
    task: dsl.PipelineTask, image: str, options: CompileOptions, *, cpu: str, memory: str, cached: bool = False
) -> dsl.PipelineTask:
    """Image, resources, credentials, volumes and the run's id, the same way for every task."""
    task.set_container_image(reference(image, options.registry))
    task.set_cpu_request(cpu).set_cpu_limit(cpu).set_memory_request(memory).set_memory_limit(memory)
    task.set_caching_options(cached)
    kubernetes.use_secret_as_env(
        task, secret_name=options.secret, secret_key_to_env={key: key for key in SECRET_KEYS}, optional=True
    )
    kubernetes.use_field_path_as_env(task, env_name="KFP_GATE_RUN_ID", field_path="metadata.labels['pipeline/runid']")
    for mount in options.mounts:
        claim, _, path = mount.partition(":")
        kubernetes.mount_pvc(task, pvc_name=claim, mount_path=path)
    return task


def on_gpu(task: dsl.PipelineTask, options: CompileOptions, *, shared_memory: str = "2Gi") -> dsl.PipelineTask:
    """The gate's GPU, and a /dev/shm larger than the container default of 64 MiB for loader workers."""
    if options.gate_gpus:
        task.set_accelerator_type(options.gpu).set_accelerator_limit(options.gate_gpus)
    kubernetes.empty_dir_mount(
        task,
        volume_name="shm",
        mount_path="/dev/shm",  # noqa: S108  # the mount point that loader workers use
        medium="Memory",
        size_limit=shared_memory,
    )
    return task


def launches(task: dsl.PipelineTask, options: CompileOptions) -> dsl.PipelineTask:
    """What the ranks that this task starts, or checks the way for, need to know of the compile options."""
    task.set_env_variable("KFP_GATE_WORKER_IMAGE", reference("worker", options.registry))
    task.set_env_variable("KFP_GATE_MOUNTS", ",".join(options.mounts))
    task.set_env_variable("KFP_GATE_SECRET", options.secret)
    return task


def refuse_bad_mounts(options: CompileOptions) -> None:
    """Raise ValueError for a mount that is not `claim:/path`."""
    bad = [m for m in options.mounts if not m.partition(":")[0] or not m.partition(":")[2].startswith("/")]
    if bad:
        raise ValueError(f"mount {bad[0]!r}: expected claim:/path, for instance datasets:/data")


def described(text: str, *used: BaseComponent) -> Callable[[Function], Function]:
    """Give a pipeline function a docstring: `text`, and each parameter as the first component describes it."""
    told = {
        name: spec.description
        for component in reversed(used)
        for name, spec in component.component_spec.inputs.items()
        if spec.description
    }

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        lines = [f"    {name}: {' '.join(told[name].split())}" for name in parameters]
        function.__doc__ = "\n".join([text, "", "Args:", *lines])
        return function

    return decorate
