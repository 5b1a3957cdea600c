"""Bit comparison, projections, replay and verdicts."""
