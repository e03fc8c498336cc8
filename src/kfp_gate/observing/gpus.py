"""One GPU through NVML: use, memory, clocks, power, PCIe. What a driver does not tell is unknown, never zero.

NVML's utilisation is the share of its last sampling period (1/6 to 1 s) in which any kernel ran: 100% does not mean
busy multiprocessors, and on MIG it is not supported (NVML API reference, nvmlUtilization_t).
"""

import re
from collections.abc import Callable
from typing import Any

from kfp_gate.observing.gpu_readings import READINGS

FINAL = {
    "NVMLError_NotSupported": "not supported by this device or driver",
    "NVMLError_InvalidArgument": "not defined for this device",
    "NVMLError_NoPermission": "this container may not read it",
    "NVMLError_FunctionNotFound": "not known to this driver",
    "NVMLError_ArgumentVersionMismatch": "not known to this driver",
    "NVMLError_LibraryNotFound": "no NVIDIA driver",
    "NVMLError_DriverNotLoaded": "no NVIDIA driver",
}
"""Answers that stay as they are: asked once. Any other error costs the value of that one sample."""

LOST = {
    "NVMLError_GpuIsLost": "the device is lost",
    "NVMLError_DriverNotLoaded": "the driver is gone",
    "NVMLError_Uninitialized": "the driver is gone",
}
"""Answers after which nothing is asked any more."""


class Gpu:
    """A handle to one device; readings that fail are None, with the reason kept."""

    def __init__(self, uuid_or_index: str | int) -> None:
        """Raises OSError, with the reason, if there is no driver or no such device."""
        import pynvml

        self._nvml: Any = pynvml
        self.lost = ""
        """Why nothing is read any more."""
        self.unknown: dict[str, str] = {}
        """Reasons by reading; `gpu` stands for all of them."""
        self._told: set[str] = set()
        try:
            pynvml.nvmlInit()
            self._handle = self._find(uuid_or_index)
        except pynvml.NVMLError as error:
            raise OSError(f"no NVML device: {reason(error)}") from None
        self._names = _reason_names(pynvml)
        self._board = self._handle
        self.mig = self._settle_mig()

    def describe(self) -> dict[str, Any]:
        """The `gpu` line: what the device is, and which readings it does not give. Reads once to know that."""
        n, handle = self._nvml, self._handle
        self.read()
        values = {
            "uuid": self._try("uuid", lambda: _text(n.nvmlDeviceGetUUID(handle))),
            "name": self._try("name", lambda: _text(n.nvmlDeviceGetName(handle))),
            "mig": self.mig,
            "driver": self._try("driver", lambda: _text(n.nvmlSystemGetDriverVersion())),
            "max_sm_mhz": self._highest_clock(),
        }
        return {**values, "unknown": self.news()}

    def read(self) -> dict[str, Any]:
        """The values of `READINGS`; None for what is unknown."""
        if self.lost:
            return dict.fromkeys(READINGS)
        n, h = self._nvml, self._handle
        self._errors: list[str] = []
        use = self._try("gpu_util", lambda: n.nvmlDeviceGetUtilizationRates(h))
        memory = self._try("gpu_memory_used", lambda: n.nvmlDeviceGetMemoryInfo(h))
        power = self._try("gpu_power_w", lambda: n.nvmlDeviceGetPowerUsage(h))
        receive = self._try("gpu_pcie_rx", lambda: n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_RX_BYTES))
        send = self._try("gpu_pcie_tx", lambda: n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_TX_BYTES))
        # Instances of one board share its clocks and its heat, so these are the board's.
        clock = self._try("gpu_sm_mhz", lambda: n.nvmlDeviceGetClockInfo(self._board, n.NVML_CLOCK_SM))
        reasons = self._try("gpu_throttle", self._reasons)
        values = {
            "gpu_util": use.gpu / 100 if use is not None else None,
            "gpu_memory_used": memory.used if memory is not None else None,
            "gpu_memory_total": memory.total if memory is not None else None,
            "gpu_sm_mhz": clock,
            # The API gives milliwatts and kilobytes (of 1024).
            "gpu_power_w": power / 1000 if power is not None else None,
            "gpu_pcie_rx": receive * 1024 if receive is not None else None,
            "gpu_pcie_tx": send * 1024 if send is not None else None,
            "gpu_throttle": reasons,
        }
        self._judge_errors(values)
        return dict.fromkeys(READINGS) if self.lost else values

    def news(self) -> dict[str, str]:
        """Reasons that were not told yet."""
        if "gpu_memory_used" in self.unknown:
            self.unknown.setdefault("gpu_memory_total", self.unknown["gpu_memory_used"])
        fresh = {k: v for k, v in self.unknown.items() if k not in self._told}
        self._told |= set(fresh)
        return fresh

    def _highest_clock(self) -> int | None:
        """MHz that the board may reach; None if it does not say. No reading of a run: its absence is not told."""
        try:
            return int(self._nvml.nvmlDeviceGetMaxClockInfo(self._board, self._nvml.NVML_CLOCK_SM))
        except (self._nvml.NVMLError, AttributeError, TypeError, ValueError):
            return None

    def _find(self, uuid_or_index: str | int) -> Any:
        n = self._nvml
        if not isinstance(uuid_or_index, str):
            return n.nvmlDeviceGetHandleByIndex(uuid_or_index)
        try:
            return n.nvmlDeviceGetHandleByUUID(uuid_or_index)
        except n.NVMLError as error:
            # CUDA gives an instance's UUID without saying that it is one.
            if not uuid_or_index.startswith("GPU-") or type(error).__name__ == "NVMLError_LibraryNotFound":
                raise
            try:
                return n.nvmlDeviceGetHandleByUUID("MIG-" + uuid_or_index.removeprefix("GPU-"))
            except n.NVMLError:
                raise error from None

    def _settle_mig(self) -> bool | None:
        """Whether this is (part of) a divided board; None if the driver does not say. Finds the board and instance."""
        n = self._nvml
        try:
            if n.nvmlDeviceIsMigDeviceHandle(self._handle):
                self._board = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
                return True
            divided = bool(n.nvmlDeviceGetMigMode(self._handle)[0])
        except (n.NVMLError, AttributeError) as error:
            # A device that cannot be divided answers so.
            return False if type(error).__name__ in ("NVMLError_NotSupported", "NVMLError_FunctionNotFound") else None
        if divided:
            instances = self._instances()
            if len(instances) == 1:
                self._handle = instances[0]
            else:
                why = f"known for the whole board alone, of which {len(instances)} instances are seen here"
                self.unknown |= {"gpu_memory_used": why, "gpu_memory_total": why}
        return divided

    def _instances(self) -> list[Any]:
        n, found = self._nvml, []
        try:
            for index in range(n.nvmlDeviceGetMaxMigDeviceCount(self._board)):
                try:
                    found.append(n.nvmlDeviceGetMigDeviceHandleByIndex(self._board, index))
                except n.NVMLError:
                    continue
        except n.NVMLError:
            return []
        return found

    def _reasons(self) -> list[str]:
        n = self._nvml
        try:
            bits = n.nvmlDeviceGetCurrentClocksEventReasons(self._board)
        except (n.NVMLError, AttributeError) as error:
            if isinstance(error, n.NVMLError) and type(error).__name__ != "NVMLError_FunctionNotFound":
                raise
            bits = n.nvmlDeviceGetCurrentClocksThrottleReasons(self._board)
        names = [name for bit, name in self._names.items() if bits & bit]
        rest = bits & ~sum(self._names)
        return names + ([f"bits_{rest:#x}"] if rest else [])

    def _try(self, name: str, read: Callable[[], Any]) -> Any:
        if name in self.unknown or self.lost:
            return None
        try:
            return read()
        except AttributeError:
            self.unknown[name] = "not known to this nvidia-ml-py"
        except self._nvml.NVMLError as error:
            kind = type(error).__name__
            if kind in LOST:
                self._lose(f"{LOST[kind]} ({kind})")
            elif kind in FINAL:
                self.unknown[name] = reason(error)
            else:
                self._errors.append(kind)
        return None

    def _judge_errors(self, values: dict[str, Any]) -> None:
        """One reading that fails is a hiccup; a device of which nothing can be read is gone.

        In a container whose access was withdrawn every call answers "Unknown" until the process ends.
        """
        if "NVMLError_Unknown" in self._errors and all(v is None for v in values.values()):
            self._lose("the device does not answer any more (NVMLError_Unknown)")

    def _lose(self, why: str) -> None:
        self.lost = self.unknown["gpu"] = why


def open_gpu(uuid_or_index: str | int | None) -> tuple[Gpu | None, str]:
    """A GPU, or None with the reason."""
    if uuid_or_index is None:
        return None, "this process uses no GPU"
    try:
        return Gpu(uuid_or_index), ""
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    except OSError as error:
        return None, str(error)


def reason(error: Exception) -> str:
    """What an NVML error means for a reading."""
    kind = type(error).__name__
    return f"{FINAL.get(kind, str(error))} ({kind})"


def _reason_names(nvml: Any) -> dict[int, str]:
    """Bits to names, from the constants of whatever nvidia-ml-py is there.

    They are called nvmlClocksEventReason... since driver 535 and nvmlClocksThrottleReason... before.
    """
    names: dict[int, str] = {}
    for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
        for name in sorted(n for n in dir(nvml) if n.startswith(prefix)):
            bit = getattr(nvml, name)
            # "None" and "All" are no reasons.
            if isinstance(bit, int) and bit and bit & (bit - 1) == 0:
                words = re.findall("[A-Z][a-z]*", name.removeprefix(prefix))
                names.setdefault(bit, "_".join(words).lower())
    return dict(sorted(names.items()))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
