"""`rollout doctor`: a line per finding as it comes, or all of them as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from flows.server import user_api_url
from rollout.config import BatchConfig, make_config
from rollout.doctor.finding import Finding
from rollout.home import state_home

TURN_TOKENS = 32
"""Sampled tokens of the one turn that is tried."""


def diagnose(*, engine_urls: Sequence[str] | None, model: str | None, renderer: str, lake: str, as_json: bool) -> bool:
    """Run every check and show what it found; True if one failed.

    Raises:
        BadConfig: options that no batch could have.
    """
    engine, engine_url = ("external", ",".join(engine_urls)) if engine_urls else ("embedded", None)
    config = make_config(
        engine=engine, engine_url=engine_url, model=model, renderer=renderer, lake=lake, max_new_tokens=TURN_TOKENS
    )
    findings = asyncio.run(_examine(config, quiet=as_json))
    counts = {state: sum(finding.state == state for finding in findings) for state in ("ok", "warn", "fail")}
    if as_json:
        print(json.dumps({"counts": counts, "checks": [finding.to_json() for finding in findings]}, ensure_ascii=False))
    else:
        print(f"\n{counts['fail']} failed, {counts['warn']} to look at, {counts['ok']} in order")
    return counts["fail"] > 0


async def _examine(config: BatchConfig, *, quiet: bool) -> list[Finding]:
    from rollout.doctor.examine import examine

    findings = []
    say = None if quiet else _say
    async for finding in examine(config, home=state_home(), prefect_url=user_api_url(), say=say):
        findings.append(finding)
        if not quiet:
            print(f"{finding.state:<5} {finding.what:<15} {finding.detail}", flush=True)
    return findings


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
