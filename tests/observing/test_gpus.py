"""The GPU's readings, against recorded-style answers of NVML: unknown stays unknown, and says why."""

import json
import logging
from pathlib import Path
from typing import Any

import pynvml
import pytest

from kfp_gate.observing.gpu_readings import READINGS, SLOWING
from kfp_gate.observing.gpus import open_gpu
from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline, read_timeline

from .replay import NAMES, answers, replayed, write_timeline


def lines(name: str, folder: Path, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = list(read_timeline(write_timeline(name, folder / "t.jsonl", **more)))
    assert [x["kind"] for x in found] == ["gpu"] + ["sample"] * (len(found) - 1)
    return found[0], found[1:]


def test_a_healthy_device_in_the_units_of_the_timeline(tmp_path: Path) -> None:
    gpu, samples = lines("healthy", tmp_path)
    assert (gpu["name"], gpu["mig"], gpu["driver"]) == ("NVIDIA A100-SXM4-80GB", False, "550.90.07")
    assert gpu["uuid"] == answers("healthy")["ask"] and gpu["unknown"] == {}
    first = samples[0]
    assert first["gpu_util"] == 0.93 and first["gpu_power_w"] == 398.114 and first["gpu_sm_mhz"] == 1395
    assert (first["gpu_memory_used"], first["gpu_memory_total"]) == (40 << 30, 80 << 30)
    assert (first["gpu_pcie_rx"], first["gpu_pcie_tx"]) == (1790220 * 1024, 48712 * 1024)
    assert [s["gpu_throttle"] for s in samples[:3]] == [["sw_power_cap"], ["sw_power_cap"], []]


def test_a_hiccup_costs_one_value(tmp_path: Path) -> None:
    _, samples = lines("healthy", tmp_path)
    assert [s["gpu_util"] for s in samples] == [0.93, None, 0.97, 0.93, None, 0.97]
    assert all("gpu_util" not in s.get("unknown", {}) for s in samples)
    assert samples[1]["gpu_power_w"] is not None


def test_an_instance_of_a_divided_board_has_no_utilisation(tmp_path: Path) -> None:
    gpu, samples = lines("mig", tmp_path)
    assert gpu["mig"] is True and gpu["uuid"].startswith("MIG-") and gpu["driver"] == "535.183.01"
    assert gpu["unknown"] == {
        "gpu_util": "not supported by this device or driver (NVMLError_NotSupported)",
        "gpu_power_w": "not supported by this device or driver (NVMLError_NotSupported)",
        "gpu_pcie_rx": "not defined for this device (NVMLError_InvalidArgument)",
        "gpu_pcie_tx": "not defined for this device (NVMLError_InvalidArgument)",
    }
    for sample in samples:
        assert sample["gpu_util"] is None and sample["gpu_power_w"] is None and sample["gpu_pcie_rx"] is None
        # Memory is the instance's own; clocks and heat are the board's.
        assert (sample["gpu_memory_used"], sample["gpu_memory_total"]) == (10 << 30, 20937965568)
        assert sample["gpu_sm_mhz"] == 1410 and sample["gpu_throttle"] == []
        assert set(sample.get("unknown", {})).isdisjoint(READINGS), "told once, in the gpu line"


@pytest.mark.parametrize("seen", [0, 1, 3])
def test_a_divided_board_that_cuda_names_by_the_board(seen: int) -> None:
    recorded = answers("mig") | {
        "nvmlDeviceGetHandleByUUID": "board",
        "nvmlDeviceGetMaxMigDeviceCount": 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": {
            "board": {"by": ["mig0"] * seen + [{"error": "NVMLError_NotFound"}] * (7 - seen)}
        },
        "nvmlDeviceGetUUID": "GPU-board",
    }
    recorded["nvmlDeviceGetMemoryInfo"]["board"] = {"total": 80 << 30, "free": 0, "used": 80 << 30}
    with replayed(recorded) as uuid:
        gpu, why = open_gpu(uuid)
        assert gpu is not None and why == ""
        values, told = gpu.read(), gpu.describe()["unknown"]
    assert values["gpu_util"] is None
    if seen == 1:
        assert values["gpu_memory_used"] == 10 << 30
    else:
        assert values["gpu_memory_used"] is None and values["gpu_memory_total"] is None
        assert f"of which {seen} instances are seen here" in told["gpu_memory_total"]


def test_no_driver(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gpu, samples = lines("no_driver", tmp_path)
    assert {gpu[k] for k in ("uuid", "name", "mig", "driver")} == {None}
    assert gpu["unknown"] == {"gpu": "no NVML device: no NVIDIA driver (NVMLError_LibraryNotFound)"}
    assert all(sample[reading] is None for sample in samples for reading in READINGS)
    assert all(sample["rss"] > 0 for sample in samples)
    assert len([r for r in caplog.records if "GPU" in r.message]) == 1


def test_a_device_that_is_lost_is_null_from_then_on_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        gpu, samples = lines("lost_mid_run", tmp_path)
    assert gpu["mig"] is False and set(gpu["unknown"]) == {"gpu_pcie_rx", "gpu_pcie_tx"}
    assert [s["gpu_util"] for s in samples] == [0.91, 0.9, None, None, None, None]
    assert samples[1]["gpu_throttle"] == ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown"]
    assert set(samples[1]["gpu_throttle"]) <= set(SLOWING)
    for sample in samples[2:]:
        assert all(sample[reading] is None for reading in READINGS) and sample["rss"] > 0
    told = [s["unknown"]["gpu"] for s in samples if "gpu" in s.get("unknown", {})]
    assert told == ["the device is lost (NVMLError_GpuIsLost)"]
    assert len([r for r in caplog.records if "lost" in r.message]) == 1


def test_a_container_whose_access_was_withdrawn_answers_unknown_to_everything() -> None:
    recorded = answers("healthy")
    for name, value in recorded.items():
        if name.startswith("nvmlDeviceGet") and name not in ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigMode"):
            recorded[name] = {"then": [value["gpu0"], {"error": "NVMLError_Unknown"}]}
    recorded["nvmlDeviceGetPcieThroughput"] = {"error": "NVMLError_NotSupported"}
    recorded = {k: {"gpu0": v} if k.startswith("nvmlDeviceGet") and "then" in str(v)[:8] else v
                for k, v in recorded.items()}  # fmt: skip
    with replayed(recorded) as uuid:
        gpu, _ = open_gpu(uuid)
        assert gpu is not None
        assert gpu.read()["gpu_power_w"] is not None
        assert set(gpu.read().values()) == {None}
        assert gpu.lost == "the device does not answer any more (NVMLError_Unknown)"


def test_one_reading_that_answers_unknown_is_no_lost_device() -> None:
    recorded = answers("healthy") | {"nvmlDeviceGetPowerUsage": {"error": "NVMLError_Unknown"}}
    with replayed(recorded) as uuid:
        gpu, _ = open_gpu(uuid)
        assert gpu is not None
        values = gpu.read()
    assert values["gpu_power_w"] is None and values["gpu_util"] == 0.97 and not gpu.lost and not gpu.unknown


def test_reasons_have_the_same_names_under_old_and_new_constants() -> None:
    recorded = answers("healthy") | {"nvmlDeviceGetCurrentClocksEventReasons": 0x1FF | 0x1000}
    old = recorded | {
        "nvmlDeviceGetCurrentClocksEventReasons": {"error": "NVMLError_FunctionNotFound"},
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1FF | 0x1000,
    }
    found = []
    for answer in (recorded, old):
        with replayed(answer) as uuid:
            import pynvml as replay

            if answer is old:
                for name in [n for n in dir(replay) if "EventReason" in n]:
                    delattr(replay, name)
            gpu, _ = open_gpu(uuid)
            assert gpu is not None
            found.append(gpu.read()["gpu_throttle"])
    assert sorted(found[0]) == sorted(found[1])
    assert set(SLOWING) < set(found[0]) and "gpu_idle" in found[0] and "bits_0x1000" in found[0]


def test_no_device_of_that_name_and_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = answers("healthy") | {"nvmlDeviceGetHandleByUUID": {"error": "NVMLError_NotFound"}}
    with replayed(recorded) as uuid:
        assert open_gpu(uuid) == (None, "no NVML device: Not Found (NVMLError_NotFound)")
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert open_gpu(0) == (None, "nvidia-ml-py is not installed")
    assert open_gpu(None) == (None, "this process uses no GPU")


def test_this_machine_says_why_it_has_none() -> None:
    """The real library, where there is no driver; on a machine with a GPU the device answers."""
    gpu, why = open_gpu(0)
    assert (gpu is None) == bool(why)
    assert gpu is not None or "NVMLError" in why


def test_a_reading_that_breaks_does_not_end_the_sampler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with replayed("healthy") as uuid:
        sampler = Sampler(Timeline(tmp_path / "t.jsonl"), gpu=uuid, every_s=0.01)
        sampler._gpu._nvml.nvmlDeviceGetPowerUsage = lambda handle: 1 / 0  # type: ignore[union-attr]
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                sampler._try(sampler.write)
        del sampler._gpu._nvml.nvmlDeviceGetPowerUsage  # type: ignore[union-attr]
        sampler._try(sampler.write)
    assert len([r for r in caplog.records if "a sample failed" in r.message]) == 1
    assert json.loads(sampler.timeline.path.read_text())["gpu_util"] is not None


@pytest.mark.parametrize("name", NAMES)
def test_the_answers_are_those_of_real_functions(name: str) -> None:
    """A name that nvidia-ml-py does not have would test nothing."""
    recorded = answers(name)
    assert all(callable(getattr(pynvml, key)) for key in recorded if key not in ("about", "ask"))
