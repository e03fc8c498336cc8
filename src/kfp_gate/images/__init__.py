"""Image names, locks and import checks."""
