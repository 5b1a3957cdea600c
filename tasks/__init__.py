"""Thin Prefect tasks around rollout/."""
