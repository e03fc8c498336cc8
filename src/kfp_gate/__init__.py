"""Leak-free splits, distributed training, a per-class gate and verified registration for object detectors."""

__version__ = "0.1.0"
