"""The agent `careful`: asks, and asks again until the answer has the form that the reward can read."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

TRIES = 3
AGAIN = "Write the last line as `Answer: ` and the number."


async def run(
    base_url: str,
    prompt: list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    *,
    api_key: str,
    **kwargs: Any,
) -> dict[str, Any]:
    """Talk to the session at `base_url` as to any OpenAI server; every turn is recorded there.

    `kwargs` holds the row's `tools` and `label`. What is returned goes into the rows' metadata.
    """
    messages = list(prompt)
    # max_retries=0: a repeat behind the agent's back would be another call of the engine.
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=None) as client:
        tries = 0
        while tries < TRIES:
            tries += 1
            reply = await client.chat.completions.create(model="policy", messages=messages, extra_body=request_kwargs)
            message = reply.choices[0].message
            if "Answer: " in (message.content or "") or reply.choices[0].finish_reason == "length":
                break
            messages += [message.model_dump(exclude_unset=True), {"role": "user", "content": AGAIN}]
    return {"metadata": {"tries": tries}}
