"""All checks in the order in which a batch would meet them, each finding as it comes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rollout.batch.model import fetched_directory
from rollout.config import BatchConfig
from rollout.doctor.engine import check_agreement, check_engine
from rollout.doctor.finding import Finding, fail, ok, warn
from rollout.doctor.lake import check_lake
from rollout.doctor.orchestrator import check_prefect
from rollout.doctor.packages import check_packages
from rollout.doctor.parts import check_parts
from rollout.doctor.sessions import check_sessions
from rollout.doctor.space import check_space
from rollout.doctor.tokens import Prompt, check_tokens
from rollout.engine.embedded import start_embedded
from rollout.errors import BadInput, RolloutLakeError
from rollout.process import Child


async def examine(
    config: BatchConfig, *, home: Path, prefect_url: str | None, say: Callable[[str], None] | None = None
) -> AsyncIterator[Finding]:
    """Check everything that a batch of `config` needs. Children that are started are ended.

    Args:
        home: the command's state folder.
        prefect_url: the Prefect API that the user has chosen, null for one of our own.
        say: told how far a fetch of the model is; from another thread.
    """
    for finding in (*check_packages(), *check_parts()):
        yield finding
    try:
        directory = await fetched_directory(config, say)
    except BadInput as error:  # of a model on s3://
        yield fail("model", f"{error}; tokens, engine and sessions are not tried without it")
    else:
        findings, prompt = check_tokens(directory, config.renderer)
        for finding in findings:
            yield finding
        with tempfile.TemporaryDirectory(prefix="rollout-doctor-") as logs:
            for finding in await _check_servers(config, directory, prompt, Path(logs)):
                yield finding
    for finding in await asyncio.to_thread(check_lake, config.lake):
        yield finding
    yield check_space("ROLLOUT_HOME", home)
    yield await check_prefect(prefect_url)


async def _check_servers(config: BatchConfig, directory: Path, prompt: Prompt | None, logs: Path) -> list[Finding]:
    """The engines, and a session server in front of them."""
    if config.engine_url is not None:
        return [*_own_tokenizer(config), *await _check_engines(config.engine_urls, config, directory, prompt, logs)]
    try:
        child = await start_embedded(directory, log=logs / "engine.log")
    except RolloutLakeError as error:
        return [fail("engine", f"the embedded engine does not start: {error}")]
    try:
        return [_started(child), *await _check_engines([child.url], config, directory, prompt, logs)]
    finally:
        await asyncio.to_thread(child.stop)


async def _check_engines(
    urls: Sequence[str], config: BatchConfig, directory: Path, prompt: Prompt | None, logs: Path
) -> list[Finding]:
    findings = []
    for url in urls:
        found = await check_engine(url, prompt, embedded=config.engine_url is None)
        findings += found if len(urls) == 1 else [_named(finding, url) for finding in found]
    if len(urls) > 1 and not _failed(findings):
        findings.append(await check_agreement(urls))
    if prompt is None or _failed(findings):
        return [*findings, warn("sessions", "not tried: they need an engine, tokenizer and renderer that are in order")]
    return [*findings, await check_sessions(urls, directory, config, logs / "session.log")]


def _failed(findings: Sequence[Finding]) -> bool:
    return any(finding.state == "fail" for finding in findings)


def _named(finding: Finding, url: str) -> Finding:
    """What was found at one of several engines, with its URL."""
    return finding if url in finding.detail else replace(finding, detail=f"{url}: {finding.detail}")


def _started(child: Child) -> Finding:
    return ok("engine", f"the embedded engine starts and loads {child.facts['model_path']}")


def _own_tokenizer(config: BatchConfig) -> list[Finding]:
    if config.model is not None:
        return []
    return [warn("model", "no --model: the shipped tokenizer is used, and few engines serve it; give the engine's")]
