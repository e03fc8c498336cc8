"""Predictions to compact records to metrics; the same code in training and in the gate."""
