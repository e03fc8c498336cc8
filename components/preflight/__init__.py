"""The component `preflight`."""
