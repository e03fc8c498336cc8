"""Finds a run where it lies and reads what its ranks wrote."""
