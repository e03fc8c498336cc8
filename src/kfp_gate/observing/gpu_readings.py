"""What is read of a GPU, by the names and units of the timeline. For those who read as well as those who write."""

READINGS = {
    "gpu_util": "share of NVML's last sampling period in which any kernel ran, 0..1",
    "gpu_memory_used": "bytes in use on the device, by all processes",
    "gpu_memory_total": "bytes",
    "gpu_sm_mhz": "clock of the multiprocessors, MHz",
    "gpu_power_w": "draw of the board, W",
    "gpu_pcie_rx": "bytes a second to the device, over 20 ms",
    "gpu_pcie_tx": "bytes a second from the device, over 20 ms",
    "gpu_throttle": "names of the reasons why the clocks are what they are",
}
"""Every reading with its unit."""

SLOWING = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
"""Reasons in `gpu_throttle` that mean a device slowed down for heat or power. The others (`gpu_idle`,
`applications_clocks_setting`, `sync_boost`, `display_clock_setting`) are settings or rest."""
