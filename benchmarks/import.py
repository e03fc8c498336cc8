"""What authoring costs before the first line of a pipeline: our components against kfp's own language.

Each import runs in a fresh process, in turns, and the CPU time of that process is taken (its wall time depends on who
else uses the machine). The bar: no more than 1.5 times `import kfp.dsl`, which every author pays anyway.

    python benchmarks/import.py
"""

import json
import os
import statistics
import subprocess
import sys

ROUNDS = 9
BAR = 1.5
IMPORTS = {
    "kfp_gate.components": "import kfp_gate.components",
    "kfp_gate.pipelines": "import kfp_gate.pipelines",
    "kfp.dsl": "import kfp.dsl",
    "kfp (all of it)": "import kfp",
}


def cost(code: str) -> tuple[float, float]:
    """CPU seconds and peak resident MiB of a fresh Python that runs `code`."""
    child = subprocess.Popen([sys.executable, "-c", code])
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{code} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    for code in IMPORTS.values():
        cost(code)  # the first run of each writes byte code
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in IMPORTS}
    for _ in range(ROUNDS):
        for name, code in IMPORTS.items():
            costs[name].append(cost(code))
    seconds = {name: statistics.median(c for c, _ in found) for name, found in costs.items()}
    memory = {name: statistics.median(m for _, m in found) for name, found in costs.items()}
    print(f"{'import':22} {'CPU s':>7} {'MiB':>6} {'of kfp.dsl':>11}")
    for name in IMPORTS:
        print(f"{name:22} {seconds[name]:7.2f} {memory[name]:6.0f} {seconds[name] / seconds['kfp.dsl']:10.2f}x")
    ratio = seconds["kfp_gate.components"] / seconds["kfp.dsl"]
    result = {
        "name": "import",
        "ours": {"cpu_s": round(seconds["kfp_gate.components"], 3), "mib": round(memory["kfp_gate.components"], 1)},
        "peers": {"kfp.dsl": {"cpu_s": round(seconds["kfp.dsl"], 3), "mib": round(memory["kfp.dsl"], 1)}},
        "ratios": {"cpu_of_kfp_dsl": round(ratio, 3)},
        "bars": {"cpu_of_kfp_dsl": BAR},
        "met": ratio <= BAR,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
