"""Structural schemas as a real API server applies them: defaults, pruning, validation, transition rules."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CRDS = Path(__file__).parents[1] / "crds"
Object = dict[str, Any]


@cache
def load_crd(file: str) -> Object:
    """A CRD as committed. The C loader: the pure Python one takes seconds for each."""
    return yaml.load((CRDS / file).read_text(), Loader=yaml.CSafeLoader)


class Cause:
    """One reason for a 422."""

    def __init__(self, reason: str, message: str, field: str) -> None:
        self.reason, self.message, self.field = reason, message, field

    def json(self) -> Object:
        return {"reason": self.reason, "message": self.message, "field": self.field}


def prune(value: Any, schema: Object, path: str = "") -> list[str]:
    """Remove fields that the schema does not know, in place; returns their paths."""
    unknown: list[str] = []
    if isinstance(value, dict):
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return []
        properties = schema.get("properties")
        extra = schema.get("additionalProperties")
        for key in list(value):
            here = f"{path}.{key}" if path else key
            if path == "" and key in ("apiVersion", "kind", "metadata"):
                continue
            if properties and key in properties:
                unknown += prune(value[key], properties[key], here)
            elif isinstance(extra, dict):
                unknown += prune(value[key], extra, here)
            elif (
                extra is True
                or (path == "metadata" and not properties)
                or (
                    properties is None
                    and extra is None
                    and schema.get("type") == "object"
                    and path.endswith("metadata")
                )
            ):
                continue
            else:
                unknown.append(here)
                del value[key]
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, item in enumerate(value):
            unknown += prune(item, schema["items"], f"{path}[{number}]")
    return unknown


def default(value: Any, schema: Object) -> None:
    """Fill in defaults, in place."""
    if isinstance(value, dict):
        for key, part in (schema.get("properties") or {}).items():
            if key not in value and "default" in part:
                value[key] = part["default"]
            if key in value:
                default(value[key], part)
        if isinstance(schema.get("additionalProperties"), dict):
            for item in value.values():
                default(item, schema["additionalProperties"])
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for item in value:
            default(item, schema["items"])


def validate(value: Any, schema: Object, path: str = "") -> list[Cause]:
    """What the structural part of the schema refuses."""
    causes: list[Cause] = []

    def invalid(text: str) -> None:
        shown = f'"{value}"' if isinstance(value, str) else str(value)
        causes.append(Cause("FieldValueInvalid", f"Invalid value: {shown}: {path} in body {text}", path))

    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            causes.append(_type_error(value, path, "integer,string"))
            return causes
    elif (kind := schema.get("type")) and not _is(value, kind):
        causes.append(_type_error(value, path, kind))
        return causes
    if isinstance(value, str):
        if "enum" in schema and value not in schema["enum"]:
            known = ", ".join(f'"{item}"' for item in schema["enum"])
            causes.append(
                Cause("FieldValueNotSupported", f'Unsupported value: "{value}": supported values: {known}', path)
            )
        if "pattern" in schema and not re.search(schema["pattern"], value):
            invalid(f"should match '{schema['pattern']}'")
        if len(value) > schema.get("maxLength", len(value)):
            causes.append(
                Cause("FieldValueTooLong", f"Too long: may not be more than {schema['maxLength']} bytes", path)
            )
        if len(value) < schema.get("minLength", 0):
            invalid(f"should be at least {schema['minLength']} chars long")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            invalid(f"should be greater than or equal to {schema['minimum']}")
        if value > schema.get("maximum", value):
            invalid(f"should be less than or equal to {schema['maximum']}")
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            causes.append(
                Cause(
                    "FieldValueTooMany", f"Too many: {len(value)}: must have at most {schema['maxItems']} items", path
                )
            )
        keys = schema.get("x-kubernetes-list-map-keys") if schema.get("x-kubernetes-list-type") == "map" else None
        seen: set[tuple[str, ...]] = set()
        for number, item in enumerate(value):
            causes += validate(item, schema.get("items") or {}, f"{path}[{number}]")
            if keys and isinstance(item, dict):
                identity = tuple(str(item.get(key)) for key in keys)
                if identity in seen:
                    causes.append(Cause("FieldValueDuplicate", "Duplicate value", f"{path}[{number}]"))
                seen.add(identity)
    elif isinstance(value, dict):
        for key in schema.get("required") or ():
            if key not in value:
                causes.append(Cause("FieldValueRequired", "Required value", f"{path}.{key}".lstrip(".")))
        for key, part in (schema.get("properties") or {}).items():
            if key in value and not (path == "" and key == "metadata"):
                causes += validate(value[key], part, f"{path}.{key}".lstrip("."))
        if isinstance(schema.get("additionalProperties"), dict):
            for key, item in value.items():
                causes += validate(item, schema["additionalProperties"], f"{path}.{key}".lstrip("."))
    return causes


NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
URI = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://.+$")
RULES = {
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')": lambda v: bool(NAME.match(v["metadata"]["name"])),
    "size(self.metadata.name) <= 63": lambda v: len(v["metadata"]["name"]) <= 63,
    "self == '' || self.matches('^[A-Za-z][A-Za-z0-9+.-]*://.+$')": lambda v: v == "" or bool(URI.match(v)),
    "self in ['trainer.kubeflow.org/trainjob-controller', 'kueue.x-k8s.io/multikueue']": lambda v: (
        v in ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")
    ),
    "self >= 1": lambda v: v >= 1,
    "has(self.lastUpdatedTime)": lambda v: "lastUpdatedTime" in v,
    "[has(self.torch), has(self.mpi), has(self.jax), has(self.xgboost),has(self.flux)].filter(x, x).size() <= 1": (
        lambda v: sum(key in v for key in ("torch", "mpi", "jax", "xgboost", "flux")) <= 1
    ),
    "!self.exists(c, c == 'node')": lambda v: "node" not in v,
    "!(has(self.startupPolicy) && self.startupPolicy.startupPolicyOrder == 'InOrder' && "
    "self.replicatedJobs.exists(x, has(x.dependsOn)))": lambda v: (
        not (
            (v.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder"
            and any("dependsOn" in job for job in v.get("replicatedJobs", ()))
        )
    ),
    "self.templates.all(t, !has(t.metadata.namespace) || size(t.metadata.namespace) == 0)": lambda v: all(
        not t.get("metadata", {}).get("namespace") for t in v["templates"]
    ),
}
"""The CEL rules of the committed CRDs, by their text. An unknown one is an error: a new CRD needs a look."""


def rules(value: Any, old: Any, schema: Object, path: str = "") -> list[Cause]:
    """What the CEL rules refuse. `old` is None on creation; then transition rules are not asked."""
    causes: list[Cause] = []
    for rule in schema.get("x-kubernetes-validations") or ():
        text = " ".join(rule["rule"].split())
        if text == "self == oldSelf":
            if old is not None and value != old:
                causes.append(Cause("FieldValueInvalid", f"Invalid value: {rule['message']}", path))
        elif not RULES[text](value):
            causes.append(Cause("FieldValueInvalid", f"Invalid value: {rule['message']}", path or "<nil>"))
    if isinstance(value, dict):
        for key, part in (schema.get("properties") or {}).items():
            if key in value:
                before = old.get(key) if isinstance(old, dict) else None
                causes += rules(value[key], before, part, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, item in enumerate(value):
            causes += rules(item, _correlated(item, old, schema), schema["items"], f"{path}[{number}]")
    return causes


def has_rules(schema: Object) -> bool:
    """Whether there are CEL rules anywhere: only then does the server say that it skipped them."""
    if schema.get("x-kubernetes-validations"):
        return True
    parts = [*(schema.get("properties") or {}).values()]
    parts += [part for key in ("items", "additionalProperties") if isinstance(part := schema.get(key), dict)]
    return any(has_rules(part) for part in parts)


def fields_v1(value: Any, schema: Object | None, dot: bool = True) -> Object:
    """The fieldsV1 form of managedFields."""
    if isinstance(value, dict) and value:
        tree: Object = {".": {}} if dot else {}
        for key, item in value.items():
            tree[f"f:{key}"] = fields_v1(item, ((schema or {}).get("properties") or {}).get(key))
        return tree
    if isinstance(value, list) and value and (schema or {}).get("x-kubernetes-list-type") == "map":
        tree = {".": {}}
        for item in value:
            keys = {key: item[key] for key in schema["x-kubernetes-list-map-keys"] if key in item}
            identity = "k:{" + ",".join(f'"{k}":"{v}"' for k, v in keys.items()) + "}"
            tree[identity] = fields_v1(item, schema.get("items"))
        return tree
    return {}


def _correlated(item: Any, old: Any, schema: Object) -> Any:
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(old, list) or not isinstance(item, dict):
        return None
    return next((o for o in old if all(o.get(k) == item.get(k) for k in keys)), None)


def _type_error(value: Any, path: str, kind: str) -> Cause:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    found = names.get(type(value), "null")
    return Cause(
        "FieldValueTypeInvalid", f'Invalid value: "{found}": {path} in body must be of type {kind}: "{found}"', path
    )


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, {"string": str, "boolean": bool, "array": list, "object": dict}[kind])
