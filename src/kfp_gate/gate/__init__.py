"""Criteria, verdicts, waivers and the report."""
