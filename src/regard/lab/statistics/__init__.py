"""Interim analyses and verdicts."""
