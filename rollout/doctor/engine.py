"""An engine, tried as a session would use it. SGLang ends with the first id outside its vocabulary, so ids go last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from rollout.doctor.asking import Answer, NoAnswer, ask
from rollout.doctor.clock import judge_date
from rollout.doctor.finding import Finding, fail, ok, warn
from rollout.doctor.tokens import Prompt
from rollout.engine.agreement import common_facts
from rollout.engine.client import OTHER_PATHS, EngineClient
from rollout.engine.generation import Generation, read_generation
from rollout.errors import EngineError, EngineMismatch, EngineRefused

SEED = 20261202
NEW_TOKENS = 16
TEMPERATURE = 3.0
"""So high that another seed gives other tokens: a trained policy is too sure of itself at 1 to show an ignored one."""
TIMEOUT_S = 120.0
"""Seconds for one short generation: the first one of an engine may compile something."""


async def check_engine(url: str, prompt: Prompt | None, *, embedded: bool) -> list[Finding]:
    """Everything about the engine at `url`; without a prompt it is only asked what it is."""
    url = url.rstrip("/")
    try:
        answer = await _model_info(url)
    except NoAnswer as error:
        return [fail("engine", f"{error}: start the engine, or correct --engine-url")]
    info = answer.json
    if answer.status != 200 or not isinstance(info, dict):
        return [
            fail("engine", f"{url}/model_info answers {answer.status} and no facts: give the URL of an SGLang server")
        ]
    findings = [_describe(url, info), judge_date("the engine's host", answer.date, answer.at), *await _workers(url)]
    if prompt is None:
        return [*findings, warn("generate", "not tried: without a tokenizer and renderer there is no prompt")]
    context = await _context(url, info)
    findings += [*_check_vocabulary(info, prompt), _check_context(context, prompt)]
    if any(finding.state == "fail" for finding in findings):
        return [*findings, warn("generate", "not tried: the ids of this tokenizer may not be this engine's")]
    return [*findings, *await _check_generations(url, prompt, embedded=embedded)]


async def check_agreement(urls: Sequence[str]) -> Finding:
    """Whether engines that are to share sessions serve the same."""
    try:
        facts = await common_facts(urls)
    except (EngineError, EngineMismatch) as error:
        return fail("engines", f"{error}: start them alike, or leave one out")
    return ok("engines", f"all {len(urls)} state the same {', '.join(facts)}")


async def _model_info(url: str) -> Answer:
    answer = await ask(f"{url}/model_info")
    return answer if answer.status != 404 else await ask(url + OTHER_PATHS["/model_info"])


async def _workers(url: str) -> list[Finding]:
    """A router's workers, each asked from here: aborts and backpressure go to them, not through the router."""
    async with EngineClient(url) as client:
        try:
            engines = await client.engines()
        except EngineError as error:
            return [warn("router", f"{error}: whether this is a router is not known")]
    if engines == [url]:
        return []
    for engine in engines:
        try:
            await ask(f"{engine}/health")
        except NoAnswer as error:
            return [warn("router", f"{error}: let this machine reach the router's workers: aborts go to them")]
    return [ok("router", f"{url} is a router before {', '.join(engines)}")]


def _describe(url: str, info: dict[str, Any]) -> Finding:
    version = info.get("weight_version")
    weights = "" if version is None else f", weights {version!r}"
    return ok("engine", f"{url} answers: {info.get('model_path')}{weights}")


async def _context(url: str, info: dict[str, Any]) -> int | None:
    """The longest sequence that the engine takes, null where it does not say."""
    found = info.get("context_length")
    if found is None:
        try:
            async with EngineClient(url) as client:
                found = (await client.facts("/v1/models"))["data"][0]["max_model_len"]
        except (EngineError, LookupError, TypeError):
            return None
    return found if isinstance(found, int) else None


def _check_vocabulary(info: dict[str, Any], prompt: Prompt) -> list[Finding]:
    """The engine's own statement of its vocabulary, where it makes one."""
    served = info.get("vocab_size")
    if not isinstance(served, int):
        return []
    if prompt.vocabulary is not None and served != prompt.vocabulary:
        return [
            fail(
                "vocabulary",
                f"the engine serves {served} ids, the checkpoint's config.json says {prompt.vocabulary}: give the "
                "--model that the engine serves",
            )
        ]
    if prompt.tokenizer.size > served:
        detail = f"the tokenizer has {prompt.tokenizer.size} ids, the engine serves {served}: give the engine's --model"
        return [fail("vocabulary", detail)]
    return [ok("vocabulary", f"the engine serves {served} ids, as the checkpoint says")]


def _check_context(context: int | None, prompt: Prompt) -> Finding:
    needed, model = len(prompt.ids) + NEW_TOKENS + 1, prompt.tokenizer.context_length
    if context is None:
        return warn("context", "the engine does not say its context length: keep --max-seq-len below it yourself")
    if context < needed:
        detail = f"{context} tokens do not hold a small conversation with tools ({needed}): raise its context length"
        return fail("context", detail)
    if model is not None and context > model:
        return warn(
            "context", f"{context} tokens, the checkpoint was made for {model}: lower the engine's context length"
        )
    return ok("context", f"{context} tokens" + ("" if model is None else f", the checkpoint's is {model}"))


async def _check_generations(url: str, prompt: Prompt, *, embedded: bool) -> list[Finding]:
    async with EngineClient(url, timeout_s=TIMEOUT_S) as client:
        text = await _check_text(client, prompt)
        if text.state == "fail":
            return [text, warn("generate", "not tried: the engine's tokenizer is not this one")]
        first = await _generate(client, prompt)
        if isinstance(first, Finding):
            return [text, first]
        second = await _generate(client, prompt)
    n_sampled, n_sent = len(first.output_ids_O), len(prompt.ids)
    counted = ok("generate", f"{n_sent} ids sent and counted, {n_sampled} sampled, every logprob finite")
    if not first.prompt_tokens:
        counted = warn("generate", f"{n_sampled} ids sampled; the engine does not say how many of ours it read")
    return [text, counted, second if isinstance(second, Finding) else _check_repeat(first, second, embedded=embedded)]


async def _check_text(client: EngineClient, prompt: Prompt) -> Finding:
    """Let the engine's own tokenizer read the prompt's text, and compare how many ids it makes of it."""
    request = {"text": prompt.text, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    try:
        reply = await client.generate(request, rid=f"doctor-{uuid4().hex}", session_id=None)
    except EngineRefused as error:
        return ok("engine's ids", f"not compared, the engine takes no text: {error}")
    except EngineError as error:
        return fail("engine's ids", f"{error}: see the engine's log")
    meta = reply.get("meta_info")
    counted = meta.get("prompt_tokens") if isinstance(meta, dict) else None
    n_ids = len(prompt.ids)
    if counted == n_ids:
        return ok("engine's ids", f"its tokenizer makes {n_ids} ids of the prompt's text, as ours does")
    if counted == n_ids + 1:
        return warn("engine's ids", f"its tokenizer makes one id more than our {n_ids} of the same text (a first id?)")
    detail = f"its tokenizer makes {counted} ids of a text that ours makes {n_ids} of: give the --model that it serves"
    return fail("engine's ids", detail)


async def _generate(client: EngineClient, prompt: Prompt) -> Generation | Finding:
    """One seeded generation of the prompt's ids, read as strictly as a session reads it."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "sampling_seed": SEED}
    request = {"input_ids": prompt.ids, "sampling_params": sampling, "return_logprob": True}
    vocabulary = prompt.vocabulary or prompt.tokenizer.size
    try:
        reply = await client.generate(request, rid=f"doctor-{uuid4().hex}", session_id=None)
        return read_generation(reply, vocabulary=vocabulary, n_prompt=len(prompt.ids))
    except EngineError as error:
        return fail("generate", f"{error}: a batch needs SGLang's native /generate; see the engine's log and flags")


def _check_repeat(first: Generation, second: Generation, *, embedded: bool) -> Finding:
    """Bits, not values: that is what a resumed batch and a live parity check rely on."""
    same_ids = np.array_equal(first.output_ids_O, second.output_ids_O)
    if same_ids and first.output_log_probs_O.tobytes() == second.output_log_probs_O.tobytes():
        return ok("repeats", "the same seed gave the same tokens and the same bits of every logprob")
    what = "other logprob bits" if same_ids else "other tokens"
    if embedded:
        return fail("repeats", f"the same seed gave {what}: the embedded engine never may; report this machine's kind")
    detail = f"the same seed gave {what}: start SGLang with --enable-deterministic-inference if batches must repeat"
    return warn("repeats", detail)
