"""The component `validation_gate`."""
