"""The commands that need no kfp, one module for each room that they open a door of."""
