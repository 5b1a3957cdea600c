"""Agents, rewards, pickers, finishers and matchers that are installed but cannot be used."""

from __future__ import annotations

from rollout.doctor.finding import Finding, fail, ok


def check_parts() -> list[Finding]:
    """Load every part as a batch would."""
    from rollout.installed import installed_parts  # imports every part's module, which takes a while

    parts = installed_parts()
    problems = [f"{part.problem}: repair or uninstall {part.package}" for part in parts if part.problem is not None]
    usable = sum(part.problem is None for part in parts)
    return [ok("parts", f"{usable} can be used"), *(fail("parts", problem) for problem in problems)]
