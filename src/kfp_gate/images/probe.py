"""Try imports in a child process, and say of each whether it works.

A package may end the process that imports it, by a signal or by leaving it. So the child writes each answer before
the next import starts, and the parent knows by the last line which import it was, and goes on after it.
"""

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from kfp_gate.errors import Broken

SECONDS = 600
"""Time for one child; the imports of the largest image take about 20 s when its files are not cached."""

_MARK = b"\x1e\n"
"""Parts what each import wrote to stderr from what the one before wrote."""


def try_imports(tasks: Sequence[tuple[str, Sequence[str]]]) -> list[str | None]:
    """Do what `import module` (no names) or `from module import names` does, for each of `tasks`.

    Returns:
        None for an import that works, else what went wrong, in the order of `tasks`.

    Raises:
        Broken: one import did not come back within `SECONDS`.
    """
    results: list[str | None] = [None] * len(tasks)
    # kfp is installed without what authoring needs, and looks for it unless it is told that it runs a step.
    environment = os.environ | {"_KFP_RUNTIME": "true"}
    command = [sys.executable, "-m", "kfp_gate.images.probe"]
    start = 0
    while start < len(tasks):
        given = json.dumps([[module, list(names)] for module, names in tasks[start:]])
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment
            )
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            raise Broken(
                f"an import that did not end within {SECONDS} s",
                expected="imports that end",
                where=tasks[start + _last(_answers(said), "start")][0],
                next_step="import this module alone to see what it waits for",
            ) from None
        answers = _answers(done.stdout)
        for answer in answers:
            if "end" in answer:
                results[start + answer["end"]] = answer["error"]
        if any(answer.get("end") == len(tasks) - start - 1 for answer in answers):
            break
        start += _last(answers, "start")
        last = done.stderr.rpartition(_MARK.decode())[2].strip().splitlines()[-1:]
        results[start] = ": ".join([f"ended the process with code {done.returncode}", *last])
        start += 1
    return results


def main() -> None:
    """The child: read a JSON list of [module, names], answer `start N` and `end N, error` as JSON lines."""
    tasks = json.load(sys.stdin)
    # Packages print while they are imported. What they print goes to stderr; the answers keep stdout to themselves.
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as answers:
        os.dup2(2, 1)
        warnings.simplefilter("ignore")
        for number, (module, names) in enumerate(tasks):
            answers.write(json.dumps({"start": number}) + "\n")
            os.write(2, _MARK)
            answers.write(json.dumps({"end": number, "error": _attempt(module, names)}) + "\n")


def _attempt(module: str, names: list[str]) -> str | None:
    try:
        found = importlib.import_module(module)
        for name in names:
            if name != "*" and not hasattr(found, name):
                _submodule(module, name)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a module may raise SystemExit or an exception of its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _submodule(module: str, name: str) -> None:
    """`from module import name`, where `name` is not there until it is imported as a module."""
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"{module}.{name}":
            raise ImportError(f"cannot import name {name!r} from {module!r}") from None
        raise


def _answers(text: str) -> list[dict[str, Any]]:
    """The complete lines of a child's output; the last may be cut off."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def _last(answers: list[dict[str, Any]], key: str) -> int:
    return max((answer[key] for answer in answers if key in answer), default=0)


if __name__ == "__main__":
    main()
