"""What the embedded engine serves, and its answers in SGLang's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.engine.checkpoint import Checkpoint
from rollout.engine.params import Limits
from rollout.engine.scheduler import Job
from rollout.tito.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What is served: the checkpoint, its tokenizer, and the names that the answers give them."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    context: int
    weight_version: str

    @property
    def limits(self) -> Limits:
        return Limits(vocabulary=self.checkpoint.config.vocabulary, context=self.context, encode=self.tokenizer.encode)


def render(job: Job, served: Served) -> dict[str, Any]:
    """SGLang's answer to a `/generate` request, from a job that ended."""
    request, count = job.request, len(job.output_ids)
    version = served.weight_version
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": job.finish,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
        "num_retractions": 0,
        "e2e_latency": job.ended - job.arrived,
    }
    if request.return_logprob:
        pairs = zip(job.log_probs, job.output_ids, strict=True)
        meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
    return {"text": _text(job, served.tokenizer), "output_ids": job.output_ids, "meta_info": meta}


def _text(job: Job, tokenizer: Tokenizer) -> str:
    """The output as text: a stop token dropped and a stop string cut off, unless no_stop_trim."""
    params, ids = job.request.params, job.output_ids
    matched = (job.finish or {}).get("matched")
    trim = not params.no_stop_trim
    if trim and isinstance(matched, int):
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    if trim and isinstance(matched, str) and matched in text:
        text = text[: text.index(matched)]
    return text
