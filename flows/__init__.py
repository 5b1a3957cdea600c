"""The user-facing batch flows and the `rollout` command; no logic lives here."""

from rollout.guard import check_packages

check_packages()
