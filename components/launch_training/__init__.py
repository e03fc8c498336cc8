"""The component `launch_training`."""
