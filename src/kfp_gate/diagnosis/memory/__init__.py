"""How a run's memory developed, and what could be the matter with it."""
