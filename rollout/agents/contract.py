"""The agent contract: what an agent is given, what it may give back, and how it is run.

An agent is `async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None`,
offered under the entry point group `rollout.agents`. Each call runs in a thread of its own, a coroutine
in a loop of its own there (rollout.user_call): an agent that blocks holds up nobody else. The agents of
this package, which do not block, run in the worker's loop.

base_url        the session; OpenAI clients take it + "/v1", Anthropic clients as it is
prompt          the row's messages
request_kwargs  sampling parameters by their OpenAI (SGLang) names, to be sent with each request; the
                session pins them anyway
metadata        the row's metadata, `max_seq_len` if there is one, `session_server_id` ("host:port") and
                `session_server_instance_id`, the server's name for its process, if it has one
kwargs          `api_key` (the session's own key), `tools` and `label` of the row

It may return `reward` (a number), `metadata` (laid over the row's) and anything else that is JSON;
all of it is kept on the tape. Its `agent_metrics.total_tool_time` is each row's metadata.non_generation_time.
`needs = "v2"` on the function or its module says that it branches.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, get_args
from urllib.parse import urlsplit

import orjson

from rollout.agents.openai_client import close_connections
from rollout.errors import BadInput, Failure, RolloutFailure, UnknownPart, describe
from rollout.identity import SessionVersion
from rollout.outcome import RolloutInput
from rollout.parts import AGENTS, check_signature, declared, is_built_in, load_part
from rollout.session.client import OpenedSession
from rollout.user_call import Overdue, call_here, call_user, is_async

FORM = "run(base_url, prompt, request_kwargs, metadata, **kwargs)"

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SENT = (
    *("max_tokens", "min_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "logit_bias"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """A loaded agent and what it declares. `trusted`: it is known not to block, and needs no thread of its own."""

    name: str
    run: Callable[..., Any]
    needs: SessionVersion | None = None
    trusted: bool = False


def load_agent(name: str, command: str | None = None) -> Agent:
    """The installed agent `name`; `command` is the batch's agent_command.

    Raises:
        UnknownPart: it is not installed, cannot be loaded, takes other arguments or needs a session
            version that there is not.
        BadConfig: it runs a command, and `command` is none that can be run.
    """
    function = load_part(AGENTS, name)
    part = f"agent {name!r}"
    if declared(function, "takes_command"):
        from rollout.agents.command import parse_command

        return Agent(name=name, run=partial(function, command=parse_command(command)), trusted=True)
    check_signature(function, part, FORM, "", [], {}, {}, api_key="", tools=None, label=None)
    needs = declared(function, "needs")
    if needs is not None and needs not in get_args(SessionVersion):
        raise UnknownPart(f"{part} needs {needs!r}; the session versions are {', '.join(get_args(SessionVersion))}")
    return Agent(name=name, run=function, needs=needs, trusted=is_built_in(function))


def load_agents(names: Iterable[str], version: SessionVersion, command: str | None = None) -> dict[str, Agent]:
    """The agents of a batch by name, each once, checked before any rollout runs.

    Raises:
        UnknownPart, BadConfig: as load_agent.
        BadInput: an agent needs another session version than the batch's.
    """
    agents = {name: load_agent(name, command) for name in sorted(set(names))}
    for agent in agents.values():
        if agent.needs not in (None, version):
            raise BadInput(
                f"agent {agent.name!r} needs session version {agent.needs}, the batch has {version}: "
                f"set session_version={agent.needs} or choose another agent"
            )
    return agents


def request_kwargs(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters under the names of a chat request; unknown and null ones are left out.

    Where a parameter stands under both names, the chat request's own wins.
    """
    named = {_RENAMED.get(key, key): value for key, value in sampling.items()}
    named |= {key: value for key, value in sampling.items() if key in _RENAMED.values()}
    return {key: named[key] for key in _SENT if named.get(key) is not None}


async def run_agent(
    agent: Agent,
    given: RolloutInput,
    session: OpenedSession,
    *,
    sampling: Mapping[str, Any],
    max_seq_len: int | None,
    timeout_s: float,
) -> dict[str, Any] | None:
    """Run `agent` on copies of its input and give what it returned, as JSON would carry it.

    Raises:
        RolloutFailure: `deadline` (still running after `timeout_s` seconds), `agent_timeout` (it ended
            with a time-out of its own), `agent_error` (it raised, or returned what is not JSON).
    """
    metadata = copy.deepcopy(given.metadata) | {"session_server_id": urlsplit(session.base_url).netloc}
    if session.instance_id is not None:
        metadata["session_server_instance_id"] = session.instance_id
    if max_seq_len is not None:
        metadata["max_seq_len"] = max_seq_len
    try:
        result = await (call_here if agent.trusted else call_user)(
            agent.run if agent.trusted else _closing(agent.run),
            session.base_url,
            copy.deepcopy(given.messages),
            request_kwargs(sampling),
            metadata,
            api_key=session.session_key,
            tools=copy.deepcopy(given.tools),
            label=given.label,
            timeout_s=timeout_s,
        )
        return checked_result(result)
    except Overdue as error:
        raise _failed("deadline", f"the agent was still running after {timeout_s:.3g} s {error}".rstrip()) from error
    except RolloutFailure as error:
        if error.failure.type.startswith("agent_"):
            raise
        raise _failed("agent_error", describe(error)) from error
    except Exception as error:
        raise _failed("agent_timeout" if _timed_out(error) else "agent_error", describe(error)) from error


def _closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, closing its loop's connections at its end if it made any through openai_client."""
    if not is_async(function):
        return function

    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return await function(*args, **kwargs)
        finally:
            await close_connections()

    return run


def checked_result(result: Any) -> dict[str, Any] | None:
    """An agent's result after a trip through JSON, so that the tape holds just what was used.

    Raises:
        TypeError, ValueError: it is no object, or holds what JSON has no form for (NaN included).
    """
    if result is None:
        return None
    if not isinstance(result, dict):
        raise TypeError(f"an agent returns a dict or None, not {type(result).__name__}")
    if not isinstance(result.get("metadata") or {}, dict):
        raise TypeError(f"an agent's metadata is a dict, not {type(result['metadata']).__name__}")
    try:
        # json refuses NaN, orjson what a UTF-8 file cannot hold (lone surrogates, huge integers).
        parsed: dict[str, Any] = orjson.loads(orjson.dumps(json.loads(json.dumps(result, allow_nan=False))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the agent's result is not JSON: {error}") from error
    return parsed


def _timed_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        error = error.__cause__
    return False


def _failed(kind: Any, message: str) -> RolloutFailure:
    return RolloutFailure(Failure(type=kind, message=message))
