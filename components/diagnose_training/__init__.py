"""The component `diagnose_training`."""
