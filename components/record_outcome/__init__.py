"""The component `record_outcome`."""
