"""The Prefect server that flows would use, asked over plain HTTP: Prefect is not imported."""

from __future__ import annotations

from importlib import metadata

from rollout.doctor.asking import NoAnswer, ask
from rollout.doctor.finding import Finding, fail, ok, warn

ADVICE = "start that server, or unset PREFECT_API_URL (and your Prefect profile's) to use one of our own"


async def check_prefect(url: str | None) -> Finding:
    """Whether the server at `url` (with /api) answers, and is of the client's version; null: the user has none."""
    client = metadata.version("prefect")
    if url is None:
        return ok("prefect", f"no PREFECT_API_URL: each run starts a server of its own (prefect {client})")
    base = url.rstrip("/")
    try:
        health, version = await ask(f"{base}/health"), await ask(f"{base}/admin/version")
    except NoAnswer as error:
        return fail("prefect", f"{error}: {ADVICE}")
    if health.status in (401, 403):
        return warn("prefect", f"{url} asks for a login ({health.status}); whether yours is let in is not tried here")
    if health.status != 200:
        return fail("prefect", f"{url}/health answers {health.status}: {ADVICE}")
    if version.status != 200 or not isinstance(version.json, str):
        return warn("prefect", f"{url} answers but does not say its version; the client is {client}")
    if version.json != client:
        return warn("prefect", f"{url} is Prefect {version.json}, the client {client}: install one version on both")
    return ok("prefect", f"{url} answers, version {client} as the client's")
