"""A diagnosis as people see it: page and terminal."""
