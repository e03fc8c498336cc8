"""The README's parameter table is that of the compiled pipeline. Renew: `KFP_GATE_RENEW=1 pytest` with this file."""

import json
import os
from pathlib import Path

from kfp_gate.pipelines import gate

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- parameters -->\n", "<!-- /parameters -->\n"


def _table() -> str:
    rows = ["| parameter | default | |", "|---|---|---|"]
    for name, spec in gate.component_spec.inputs.items():
        default = f"`{json.dumps(spec.default)}`" if spec.optional else "required"
        rows.append(f"| `{name}` | {default} | {spec.description} |")
    return "\n".join(rows) + "\n"


def test_parameter_table_is_fresh() -> None:
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    fresh = head + BEGIN + _table() + END + tail
    if os.environ.get("KFP_GATE_RENEW"):
        README.write_text(fresh, encoding="utf-8")
    assert README.read_text(encoding="utf-8") == fresh
