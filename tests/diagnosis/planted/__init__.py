"""Real trainings with one planted cause each: what `tests/diagnosis/test_planted.py` and the bench run."""
