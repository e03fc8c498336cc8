"""Datasets: sources, groups, splits, coverage, manifests, local copies."""
