"""Reads timelines and says what held a run back."""
