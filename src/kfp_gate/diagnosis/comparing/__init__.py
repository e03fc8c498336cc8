"""Before and after, and the kept record of what was tried."""
