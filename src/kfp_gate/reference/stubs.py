"""Type stubs of the components: what an editor completes and a type checker checks.

`@dsl.component` gives every component the signature `(*args, **kwargs)`, and kfp ships no types. The stub says per
component which keywords it takes, of which type, and which may be left out.
"""

from collections.abc import Iterable
from typing import Any

_TYPES = {
    "String": "_Text",
    "Integer": "_Whole",
    "Float": "_Number",
    "Boolean": "_Truth",
    "List": "_Listed",
    "Dict": "_Mapped",
}

_HEAD = '''"""Generated from the components; renew it with {renew}"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from kfp.dsl import PipelineTask
from kfp.dsl.structures import ComponentSpec

class _Channel(Protocol):
    """An output of a task, or a parameter of the pipeline. kfp ships no types, so it is told by its shape."""

    name: str
    channel_type: Any
    task_name: Any

_Text: TypeAlias = str | _Channel
_Whole: TypeAlias = int | _Channel
_Number: TypeAlias = float | _Channel
_Truth: TypeAlias = bool | _Channel
_Listed: TypeAlias = Sequence[Any] | _Channel
_Mapped: TypeAlias = Mapping[str, Any] | _Channel

class _Component:
    name: str
    component_spec: ComponentSpec
    python_func: Callable[..., Any]
'''


def stub(components: Iterable[Any], renew: str) -> str:
    """The text of `components/__init__.pyi`.

    Args:
        components: KFP components, or anything with their `component_spec`.
        renew: the command that writes it again.
    """
    specs = sorted((c.component_spec for c in components), key=lambda spec: str(spec.name))
    names = [spec.name.replace("-", "_") for spec in specs]
    parts = [_HEAD.format(renew=renew)]
    for name, spec in zip(names, specs, strict=True):
        kind = "_" + "".join(word.title() for word in name.split("_"))
        first, _, _ = (spec.description or "").partition("\n")
        parts.append(f'class {kind}(_Component):\n    """{first}"""\n\n{_call(spec)}')
    parts.append("\n".join(f"{name}: _{''.join(w.title() for w in name.split('_'))}" for name in names) + "\n")
    parts.append(f"__all__ = {_listed(names)}\n")
    return "\n".join(parts)


def _call(spec: Any) -> str:
    lines = ["    def __call__(", "        self,"]
    ports = [(name, port) for name, port in spec.inputs.items() if port.type != "PipelineTaskFinalStatus"]
    if ports:
        lines.append("        *,")
    for name, port in sorted(ports, key=lambda pair: pair[1].optional):
        kind = _TYPES.get(port.type, "_Channel")
        lines.append(f"        {name}: {kind}{' = ...' if port.optional else ''},")
    return "\n".join([*lines, "    ) -> PipelineTask: ...", ""])


def _listed(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
