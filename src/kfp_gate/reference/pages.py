"""The reference page of each component, made from what it declares: nothing on it is written twice.

Inputs and outputs come from the component's interface and docstring, resources and caching from the compiled
pipelines, stability and services from `metadata.yaml`, the example from `example.py`, which a test compiles.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from kfp_gate.images.names import folder_of, image_of
from kfp_gate.submitting.parameters import pipeline_spec

_WORDS = {
    "String": "str", "Integer": "int", "Float": "float", "Boolean": "bool", "List": "list", "Dict": "dict",
    "PipelineTaskFinalStatus": "set by KFP",
}  # fmt: skip


@dataclass(frozen=True)
class Port:
    """One input or output. `default` is JSON text, "required", or "" for an output."""

    name: str
    type: str
    description: str
    default: str = ""


@dataclass(frozen=True)
class Use:
    """How a pipeline runs a component."""

    pipeline: str
    cpu: str
    memory: str
    gpus: int
    shared_memory: str
    cached: bool


@dataclass(frozen=True)
class Page:
    """Everything that a reference page says."""

    name: str
    description: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    uses: tuple[Use, ...]
    metadata: Mapping[str, Any]
    example: str


def page(component: Any, pipelines: Mapping[str, str], metadata: str, example: str) -> Page:
    """Collect the page of `component`.

    Args:
        component: a KFP component, or anything with its `component_spec`.
        pipelines: name to YAML text of the compiled pipelines.
        metadata: text of `metadata.yaml`.
        example: text of `example.py`.
    """
    spec = component.component_spec
    name = spec.name.replace("-", "_")
    return Page(
        name=name,
        description=spec.description or "",
        inputs=tuple(
            Port(key, _type(i.type), _line(i.description), _default(i)) for key, i in (spec.inputs or {}).items()
        ),
        outputs=tuple(Port(key, _type(o.type), _line(o.description)) for key, o in (spec.outputs or {}).items()),
        uses=tuple(use for pipeline, text in pipelines.items() for use in _uses(name, pipeline, text)),
        metadata=yaml.safe_load(metadata),
        example=example,
    )


def render(page: Page) -> str:
    """The page as Markdown."""
    first, _, rest = page.description.partition("\n")
    image = image_of(page.name)
    shared = "" if image == page.name.replace("_", "-") else f", shared with `{image.replace('-', '_')}`"
    parts = [
        f"<!-- Generated from component.py, metadata.yaml and example.py; renew it with {RENEW} -->",
        f"# {page.name}",
        first,
        rest.strip(),
        f"Stability: {page.metadata['stability']}. Image: `{image}`{shared} "
        f"([what it holds](../../images/{folder_of(image)}/constraints.txt)). Nothing is installed at run time.",
        "## Inputs",
        _table(
            ("input", "type", "default", ""), [(f"`{p.name}`", p.type, p.default, p.description) for p in page.inputs]
        ),
        "## Outputs",
        _table(("output", "type", ""), [(f"`{p.name}`", p.type, p.description) for p in page.outputs])
        if page.outputs
        else "None: what it has to tell it writes to MLflow.",
    ]
    if any(port.name == "Output" for port in page.outputs):
        parts.append(
            f'The verdict is the unnamed return value: a pipeline reads it as `{page.name}(...).outputs["Output"]`, '
            "and only `== True` and `== False` compile to the condition that was meant."
        )
    parts += [
        "## Resources",
        "As the shipped pipelines ask for them; in a pipeline of your own set them on the task.",
        _table(
            ("pipeline", "CPU", "memory", "GPUs", "shared memory", "cached"),
            [
                (f"`{u.pipeline}`", u.cpu, u.memory, str(u.gpus), u.shared_memory, "yes" if u.cached else "no")
                for u in page.uses
            ],
        ),
        "## Needs",
        "\n".join(f"* {d['name']} {d['version']}" for d in _dependencies(page.metadata)),
        "## Example",
        f"```python\n{page.example.replace(_NOQA, '').strip()}\n```",
        f"Last verified {page.metadata['lastVerified']:%Y-%m-%d}. Tags: {', '.join(page.metadata['tags'])}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def catalogue(pages: Sequence[Page]) -> str:
    """The page that lists all components."""
    rows = [
        (
            f"[`{p.name}`]({p.name}/README.md)",
            p.description.partition("\n")[0],
            f"`{image_of(p.name)}`",
            ", ".join(f"`{o.name}`" for o in p.outputs) or "none",
        )
        for p in pages
    ]
    return (
        "\n\n".join(
            (
                f"<!-- Generated; renew it with {RENEW} -->",
                "# Components",
                f"```python\nfrom kfp_gate.components import {', '.join(p.name for p in pages[:2])}\n```",
                _table(("component", "does", "image", "outputs"), rows),
                "How to put them together: [docs/authoring.md](../docs/authoring.md).",
            )
        )
        + "\n"
    )


_NOQA = "  # noqa: E712"
"""Only `== True` compiles to the condition; the linter does not know that, and a reader need not know the linter."""

RENEW = "`KFP_GATE_RENEW=1 pytest tests/components`"


def _dependencies(metadata: Mapping[str, Any]) -> list[dict[str, str]]:
    found = metadata["dependencies"]
    kubeflow = [{**d, "name": f"Kubeflow {d['name']}"} for d in found["kubeflow"]]
    return kubeflow + list(found.get("external_services", ()))


def _uses(name: str, pipeline: str, text: str) -> Iterable[Use]:
    spec = pipeline_spec(text, pipeline)
    dashed = name.replace("_", "-")
    executor = spec["deploymentSpec"]["executors"].get(f"exec-{dashed}")
    if executor is None:
        return
    platform = list(yaml.load_all(text, _Loader))[1:]
    settings = platform[0]["platforms"]["kubernetes"]["deploymentSpec"]["executors"][f"exec-{dashed}"]
    memory = [m.get("sizeLimit", "") for m in settings.get("emptyDirMounts", ()) if m["mountPath"] == "/dev/shm"]  # noqa: S108  # a mount point
    resources = executor["container"]["resources"]
    dags = [spec["root"]["dag"], *(c["dag"] for c in spec["components"].values() if "dag" in c)]
    task = next(dag["tasks"][dashed] for dag in dags if dashed in dag["tasks"])
    yield Use(
        pipeline,
        _amount(resources, "CpuLimit"),
        _amount(resources, "MemoryLimit"),
        int(resources.get("accelerator", {}).get("resourceCount", 0)),
        memory[0] if memory else "default",
        bool(task.get("cachingOptions", {}).get("enableCache")),
    )


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _amount(resources: Mapping[str, Any], what: str) -> str:
    return str(resources.get(f"resource{what}", "unlimited"))


def _type(declared: str) -> str:
    """`system.Dataset@0.0.1` is Dataset; KFP's names of primitive types become Python's."""
    return _WORDS.get(declared) or declared.removeprefix("system.").partition("@")[0]


def _default(port: Any) -> str:
    if port.type == "PipelineTaskFinalStatus":
        return ""
    if not port.optional:
        return "required"
    return "none" if port.default is None else f"`{json.dumps(port.default, ensure_ascii=False)}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        head,
        ["---"] * len(head),
        *([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
