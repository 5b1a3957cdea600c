"""The agent `single_turn`: asks once and takes the answer."""

from __future__ import annotations

from typing import Any

from rollout.agents.openai_client import openai_client


async def run(
    base_url: str,
    prompt: list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    *,
    api_key: str,
    tools: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> None:
    """One request with the row's messages; the row's tools are shown to the model, never run."""
    client = openai_client(base_url, api_key)
    body = {**request_kwargs, "tools": tools} if tools else request_kwargs
    await client.chat.completions.create(model="policy", messages=prompt, extra_body=body)  # type: ignore[arg-type]
