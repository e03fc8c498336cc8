"""One GPU through NVML: use, memory, clocks, power, PCIe. What a driver does not support is unknown, never zero.

NVML's utilisation is the share of its last sampling period (1/6 to 1 s) in which any kernel ran: 100% does not mean
busy multiprocessors, and on MIG it is not supported (NVML API reference, nvmlUtilization_t).
"""

from typing import Any


class Gpu:
    """A handle to one device; readings that fail are None, with the reason kept once."""

    def __init__(self, uuid_or_index: str | int) -> None:
        """Raises OSError if there is no driver or no such device."""
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            by_uuid = isinstance(uuid_or_index, str)
            get = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByIndex
            self._handle = get(uuid_or_index)
        except pynvml.NVMLError as error:
            raise OSError(f"no NVML device: {error}") from None
        self.unknown: dict[str, str] = {}

    def read(self) -> dict[str, float | None]:
        """Shares in 0..1, bytes, MHz, watts, bytes per second."""
        n, h = self._nvml, self._handle
        use = self._try("gpu_util", lambda: n.nvmlDeviceGetUtilizationRates(h))
        memory = self._try("gpu_memory", lambda: n.nvmlDeviceGetMemoryInfo(h))
        power = self._try("gpu_power", lambda: n.nvmlDeviceGetPowerUsage(h))
        receive = self._try("gpu_pcie_rx", lambda: n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_RX_BYTES))
        send = self._try("gpu_pcie_tx", lambda: n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_TX_BYTES))
        reasons = self._try("gpu_throttle", lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(h))
        return {
            "gpu_util": use.gpu / 100 if use is not None else None,
            "gpu_memory_used": memory.used if memory is not None else None,
            "gpu_memory_total": memory.total if memory is not None else None,
            "gpu_sm_mhz": self._try("gpu_sm_mhz", lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
            "gpu_power_w": power / 1000 if power is not None else None,
            "gpu_pcie_rx": receive * 1024 if receive is not None else None,
            "gpu_pcie_tx": send * 1024 if send is not None else None,
            "gpu_throttle_reasons": reasons,
        }

    def _try(self, name: str, read: Any) -> Any:
        if name in self.unknown:
            return None
        try:
            return read()
        except self._nvml.NVMLError as error:
            # Not supported stays not supported: ask once.
            if isinstance(error, self._nvml.NVMLError_NotSupported):
                self.unknown[name] = str(error)
            return None


def open_gpu(uuid_or_index: str | int | None) -> tuple[Gpu | None, str]:
    """A GPU, or None with the reason."""
    if uuid_or_index is None:
        return None, "this process uses no GPU"
    try:
        return Gpu(uuid_or_index), ""
    except (ImportError, OSError) as error:
        return None, str(error)
