"""Thin Prefect tasks around rollout/."""

from rollout.guard import check_packages

check_packages()
