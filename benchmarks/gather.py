"""Bringing the evaluation of all ranks together: records to rank 0, against `all_gather_object` of predictions.

    python benchmarks/gather.py                          500,000 detections on 3 gloo ranks
    python benchmarks/gather.py --detections 50000 --ranks 2

Each rank is a process that holds its shard before the clock starts. Counted per rank: bytes that it sends and
receives, wall and CPU seconds, memory added at most, and memory still held afterwards. The peer's predictions are COCO
result dicts, as evaluators collect them. The last line is one JSON object.
"""

import argparse
import gc
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PER_IMAGE, OBJECTS, CLASSES = 300, 20, 20
BARS = {"bytes_a_detection": 8.5, "held_on_other_ranks_mb": 1.0}


def shard(rank: int, ranks: int, detections: int) -> Any:
    from kfp_gate.evaluation.records import Matcher

    matcher = Matcher(CLASSES, abnormal=False)
    for image in range(rank, detections // PER_IMAGE, ranks):
        rng = np.random.default_rng(image)
        corner = rng.uniform(0, 500, (OBJECTS, 2))
        truth = np.concatenate([corner, corner + rng.uniform(10, 120, (OBJECTS, 2))], 1)
        kinds = rng.integers(0, CLASSES, OBJECTS)
        source = rng.integers(0, OBJECTS, PER_IMAGE)
        boxes = truth[source] + rng.normal(0, 3, (PER_IMAGE, 4))
        matcher.add(image, boxes, rng.random(PER_IMAGE), kinds[source], truth, kinds)
    return matcher.finish()


def predictions(records: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    boxes = rng.uniform(0, 600, (len(records.scores), 4)).tolist()
    images = records.images[records.detection_images].tolist()
    return [
        {"image_id": i, "category_id": c, "bbox": b, "score": s}
        for i, c, b, s in zip(images, records.classes.tolist(), boxes, records.scores.tolist(), strict=True)
    ]


def resident(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def child(engine: str, rank: int, ranks: int, detections: int) -> None:
    import torch.distributed as dist

    from kfp_gate.evaluation.columns import columns
    from kfp_gate.evaluation.gather import gather_records

    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    records = shard(rank, ranks, detections)
    own = records if engine == "kfp-gate" else predictions(records)
    count = len(records.scores)
    if engine == "kfp-gate":
        sent = 0 if rank == 0 else sum(c.nbytes for c in columns(records).values())
    else:
        # Gathered by all: each rank's bytes reach all others, padded to the longest.
        sent = len(pickle.dumps(own)) * (ranks - 1)
        del records
    # The first messages make connections and load code; that is not the gathering's.
    if engine == "kfp-gate":
        gather_records(records.select(np.arange(len(records)) < 3))
    else:
        dist.all_gather_object([None] * ranks, own[:10])
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    held, cpu, wall = resident("VmRSS"), time.process_time(), time.monotonic()
    if engine == "kfp-gate":
        result: Any = gather_records(own)
        total = len(result.scores) if result is not None else 0
    else:
        result = [None] * ranks
        dist.all_gather_object(result, own)
        total = sum(map(len, result))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    peak = resident("VmHWM") - held
    gc.collect()
    row = {
        "rank": rank, "detections": count, "gathered": total, "sent": sent, "cpu_s": cpu, "wall_s": wall,
        "peak_mb": peak, "held_mb": resident("VmRSS") - held,
    }  # fmt: skip
    print(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def run(engine: str, ranks: int, detections: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--detections", str(detections), "--ranks", str(ranks), "--child", engine]
    children = [
        subprocess.Popen([*command, "--rank", str(r)], env=env, stdout=subprocess.PIPE, text=True) for r in range(ranks)
    ]
    rows = [json.loads(c.communicate()[0].splitlines()[-1]) for c in children]
    if any(c.returncode for c in children):
        raise SystemExit(f"{engine} failed")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detections", type=int, default=500_000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.rank, options.ranks, options.detections)
        return
    print(f"{options.detections:,} detections on {options.ranks} ranks")
    print(f"{'engine':20} {'rank':>4} {'sent MB':>8} {'CPU s':>7} {'wall s':>7} {'peak MB':>8} {'held MB':>8}")
    found = {}
    for engine in ("kfp-gate", "all_gather_object"):
        rows = found[engine] = run(engine, options.ranks, options.detections)
        for r in rows:
            print(
                f"{engine:20} {r['rank']:4} {r['sent'] / 1e6:8.2f} {r['cpu_s']:7.2f} {r['wall_s']:7.2f} "
                f"{r['peak_mb']:8.1f} {r['held_mb']:8.1f}"
            )
    ours, peer = found["kfp-gate"], found["all_gather_object"]

    def bytes_each(rows: list[dict[str, Any]]) -> float:
        senders = [r for r in rows if r["sent"]]
        return sum(r["sent"] for r in senders) / sum(r["detections"] for r in senders)

    others = max((r["held_mb"] for r in ours if r["rank"]), default=0.0)
    sums = {
        name: {
            "bytes_a_detection": round(bytes_each(rows), 2), "sent_mb": round(sum(r["sent"] for r in rows) / 1e6, 2),
            "cpu_s": round(sum(r["cpu_s"] for r in rows), 3), "peak_mb_rank_0": round(rows[0]["peak_mb"], 1),
            "peak_mb_others": round(max(r["peak_mb"] for r in rows[1:]), 1),
            "held_mb_others": round(max(r["held_mb"] for r in rows[1:]), 1),
        }
        for name, rows in found.items()
    }  # fmt: skip
    complete = ours[0]["gathered"] == sum(r["detections"] for r in ours)
    print(json.dumps({
        "name": "gather", "ours": sums["kfp-gate"], "peers": {"all_gather_object": sums["all_gather_object"]},
        "ratios": {
            "bytes": round(sum(r["sent"] for r in peer) / sum(r["sent"] for r in ours), 1),
            "cpu": round(sum(r["cpu_s"] for r in peer) / max(sum(r["cpu_s"] for r in ours), 1e-9), 1),
        },
        "bars": BARS,
        # Per image twelve bytes and per object three come on top of eight a detection.
        "met": complete and bytes_each(ours) <= BARS["bytes_a_detection"] and others <= BARS["held_on_other_ranks_mb"],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
