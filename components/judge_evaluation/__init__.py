"""The component `judge_evaluation`."""
