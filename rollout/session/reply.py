"""The chat.completion that a client gets, made from a turn's ids alone: the same in a replay."""

from __future__ import annotations

from datetime import datetime
from hashlib import blake2b
from itertools import repeat
from typing import Any

from rollout.engine.generation import Generation
from rollout.session.node import Message, ids_bytes
from rollout.tito.parsing import ParsedMessage


def call_id(prompt_digest: bytes, generation: Generation, place: int) -> str:
    """Name of a turn's tool call: `call_` and 24 hex of blake2 over prompt ids, output ids and the call's place.

    Args:
        prompt_digest: 128 bits of blake2 over the prompt's ids as little-endian int32.
    """
    digest = blake2b(prompt_digest, digest_size=12)
    digest.update(ids_bytes(generation.output_ids_O))
    digest.update(place.to_bytes(4, "little"))
    return f"call_{digest.hexdigest()}"


def assistant_message(parsed: ParsedMessage, generation: Generation, prompt_digest: bytes) -> Message:
    """The assistant message as it is answered and stored; keys that say nothing are left out."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call_id(prompt_digest, generation, place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(parsed.tool_calls)
        ]
    return message


def completion(
    message: Message, generation: Generation, *, n_prompt: int, model: str, rid: str, committed_at: datetime
) -> dict[str, Any]:
    """An OpenAI chat.completion with SGLang's `meta_info` beside its choice (without routed experts)."""
    finish = "tool_calls" if message.get("tool_calls") else generation.finish
    return {
        "id": rid,
        "object": "chat.completion",
        "created": int(committed_at.timestamp()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": finish,
                "matched_stop": generation.matched,
                "meta_info": meta_info(generation, n_prompt, rid),
            }
        ],
        "usage": usage(n_prompt, len(generation.output_ids_O), generation.cached_tokens),
    }


def meta_info(generation: Generation, n_prompt: int, rid: str) -> dict[str, Any]:
    """What the engine said of the turn, in SGLang's keys."""
    reason: dict[str, Any] = {"type": generation.finish}
    if generation.finish == "stop":
        reason["matched"] = generation.matched
    elif generation.finish == "length":
        reason["length"] = len(generation.output_ids_O)
    log_probs, ids = generation.output_log_probs_O.tolist(), generation.output_ids_O.tolist()
    return {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": n_prompt,
        "completion_tokens": len(ids),
        "cached_tokens": generation.cached_tokens,
        "weight_version": generation.weight_version,
        "output_token_logprobs": list(zip(log_probs, ids, repeat(None, len(ids)), strict=True)),
        "e2e_latency": generation.engine_seconds,
    }


def usage(n_prompt: int, n_sampled: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts as OpenAI's clients read them."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_sampled,
        "total_tokens": n_prompt + n_sampled,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
