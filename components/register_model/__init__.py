"""The component `register_model`."""
