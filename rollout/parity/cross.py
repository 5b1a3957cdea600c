"""A batch's recorded turns asked of another engine: where the first token or log-prob bit moves.

Each turn's recorded prompt ids go to the other engine with the recorded sampling parameters and seed,
whatever it answered to the turn before: so one moved token does not hide what comes behind it, and a
log-prob distance is always one between the same contexts. Every exchange of the tape is asked, those that
v1 rolled back too.

Verdict of a rollout: `equal` (the same ids and log-prob bits in every turn), `differs` with reason
`tokens` or `log_probs`, `not_comparable` with reason `no_turns`, `refused` (the engine takes one of its
requests not, such as a prompt longer than its context), `aborted` or `broken` (no tape to read).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.generation import Generation
from rollout.parity.outputs import Outputs, compare_outputs, token_path
from rollout.parity.replay import prompt_ids
from rollout.parity.ulp import Unit
from rollout.parity.verdict import VerdictName
from rollout.session.tape import Tape

CHECK = "cross_engine"


def turn_request(tape: Tape, seq: int, *, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The body of POST /generate that asks an exchange's recorded turn of another engine, without rid.

    An engine that goes on where the recorded output stopped is seen by one token more, so no more is
    asked for. Where the recorded output was cut or aborted, its length is all that can be compared.

    Args:
        stop_token_ids: the family's turn ends, which a session sends beside the client's own.
    """
    exchange = tape.exchanges[seq]
    params: dict[str, Any] = dict(exchange.settings.get("sampling") or {})
    own, n_recorded = params.get("stop_token_ids", []), len(exchange.output_ids_O)
    params["stop_token_ids"] = [*own, *(number for number in stop_token_ids if number not in own)]
    most = params.get("max_new_tokens")
    wanted = n_recorded + 1 if exchange.finish == "stop" else n_recorded
    params["max_new_tokens"] = wanted if most is None else min(wanted, most)
    if "min_new_tokens" in params:
        params["min_new_tokens"] = min(params["min_new_tokens"], params["max_new_tokens"])
    if exchange.sampling_seed is not None:
        params["sampling_seed"] = exchange.sampling_seed
    request = {"input_ids": prompt_ids(tape, seq).tolist(), "sampling_params": params, "return_logprob": True}
    return {**request, "lora_path": tape.settings.lora} if tape.settings.lora else request


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A sampled token: exchange `turn`, position `token` in its output, both from 0; `path` says what is there."""

    turn: int
    token: int
    path: str

    def to_json(self) -> dict[str, Any]:
        return {"turn": self.turn, "token": self.token, "path": self.path}


@dataclass(kw_only=True, slots=True, eq=False)
class CrossVerdict:
    """One rollout against another engine.

    first_token, first_log_prob  the first of each in commit order, null: none differs
    position                     of first_token among all sampled tokens of the rollout
    ulps                         of the shared ids' log-probs: how many have which distance, by unit
    n_tokens, n_shared           sampled tokens of the tape, and those in front of a turn's first differing one
    """

    index: int
    rollout_key: int
    verdict: VerdictName = "equal"
    reason: str | None = None
    first_token: Place | None = None
    first_log_prob: Place | None = None
    position: int | None = None
    max_ulp: int | None = None
    largest: float = 0.0
    n_turns: int = 0
    n_tokens: int = 0
    n_shared: int = 0
    n_turns_parted: int = 0
    ulps: dict[Unit, Counter[int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def paths(self) -> list[str]:
        """The first differing token and log-prob, as the parity table lists them."""
        return [place.path for place in (self.first_token, self.first_log_prob) if place is not None]

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "rollout_key": self.rollout_key,
            "verdict": self.verdict,
            "reason": self.reason,
            "first_token": None if self.first_token is None else self.first_token.to_json(),
            "first_log_prob": None if self.first_log_prob is None else self.first_log_prob.to_json(),
            "max_ulp": self.max_ulp,
            "largest_difference": self.largest,
            "turns": self.n_turns,
            "tokens": self.n_tokens,
            "tokens_shared": self.n_shared,
        }


def compare_turn(tape: Tape, seq: int, answer: Generation) -> Outputs:
    """A recorded turn against another engine's answer to the same prompt."""
    exchange = tape.exchanges[seq]
    return compare_outputs(
        exchange.output_ids_O, exchange.output_log_probs_O, answer.output_ids_O, answer.output_log_probs_O
    )


def judge_cross(tape: Tape, answers: Sequence[Generation], *, index: int, rollout_key: int) -> CrossVerdict:
    """The verdict on one rollout from another engine's answers to all its turns, in the tape's order."""
    found = CrossVerdict(index=index, rollout_key=rollout_key)
    for seq, answer in enumerate(answers):
        outputs = compare_turn(tape, seq, answer)
        _count(found, tape, seq, answer, outputs)
    if not answers:
        found.verdict, found.reason = "not_comparable", "no_turns"
    elif found.first_token is not None:
        found.verdict, found.reason = "differs", "tokens"
    elif found.first_log_prob is not None:
        found.verdict, found.reason = "differs", "log_probs"
    return found


def _count(found: CrossVerdict, tape: Tape, seq: int, answer: Generation, outputs: Outputs) -> None:
    exchange, n_before = tape.exchanges[seq], found.n_tokens
    found.n_turns += 1
    found.n_tokens += len(exchange.output_ids_O)
    found.n_shared += len(outputs.ulps_S)
    found.largest = max(found.largest, outputs.largest)
    found.max_ulp = max(found.max_ulp or 0, outputs.max_ulp)
    found.ulps.setdefault(outputs.unit, Counter()).update(outputs.ulps_S.tolist())
    where, place = f"exchange[{seq}]", outputs.first_token
    if place is not None:
        found.n_turns_parted += 1
        if found.first_token is None:
            path = f"{where}.{token_path(exchange.output_ids_O, answer.output_ids_O, place)}"
            found.first_token, found.position = Place(turn=seq, token=place, path=path), n_before + place
    if outputs.first_log_prob is not None and found.first_log_prob is None:
        found.first_log_prob = Place(turn=seq, token=outputs.first_log_prob, path=f"{where}.{outputs.path}")
