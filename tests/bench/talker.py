"""An agent for benchmarks: as many turns as its row says, each of exactly so many sampled tokens, none cut."""

from __future__ import annotations

from typing import Any

from rollout.agents.openai_client import openai_client

AGENT = "bench.talker:run"
MORE = ("And then?", "Why is that?", "Say it in other words.", "What follows from it?")


async def run(
    base_url: str,
    prompt: list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    *,
    api_key: str,
    **kwargs: Any,
) -> None:
    """Talk for `metadata["turns"]` turns of `metadata["tokens"]` tokens; the last of each is `metadata["stop"]`.

    Stop tokens are kept off until the last but one, then the bias leaves nothing else. The batch's
    max_new_tokens must be greater, or the turn counts as cut and v2 does not go on behind it.
    """
    client = openai_client(base_url, api_key)
    tokens = metadata["tokens"]
    body = {**request_kwargs, "min_tokens": tokens - 1, "logit_bias": {str(metadata["stop"]): 100}}
    messages = list(prompt)
    for turn in range(metadata["turns"]):
        reply = await client.chat.completions.create(model="policy", messages=messages, extra_body=body)
        messages.append(reply.choices[0].message.model_dump(exclude_unset=True))
        messages.append({"role": "user", "content": MORE[turn % len(MORE)]})
