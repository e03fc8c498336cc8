"""The component `split_dataset`."""
