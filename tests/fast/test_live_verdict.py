"""Live verdicts on scripted sessions: whose doing a difference is, and what may be concluded from it."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
from scripted import TOOLS, Conversation, call, tiny_tito, user

from rollout.batch.repeats import read_repeats
from rollout.errors import Failure, SessionRefused
from rollout.parity.live import Run, first_difference, is_chosen, judge_live
from rollout.parity.rows import row_of
from rollout.tito.renderer import Tito


@pytest.fixture(scope="module")
def tito() -> Tito:
    return tiny_tito()


def play(talk: Conversation, *, clock: str = "noon", last: str = "yes") -> None:
    talk.ask(user("look"), text=call("Beijing"), tools=TOOLS)
    (asked,) = talk.history[-1]["tool_calls"]
    talk.ask({"role": "tool", "tool_call_id": asked["id"], "content": "12"}, text="It is 12.", tools=TOOLS)
    talk.ask(user(f"sure? it is {clock}"), text=last)


def run(tito: Tito, version: str, script: Callable[[Conversation], None] = play, **outcome: object) -> Run:
    talk = Conversation(tito, version, seed="ab")
    script(talk)
    result = talk.result(talk.outcome(**outcome))
    return Run(tape=result.tape, outcome=result.outcome, rows=[row_of(sample) for sample in result.samples])


def judge(tito: Tito, original: Run, again: Run, other: Run, *, live: bool = True, batch: bool = True):
    return judge_live(original, again, other, tito, repeats_live=live, repeats_in_batch=batch)


def flip_log_prob(given: Run) -> Run:
    """What a faulty engine gives: one bit of one log-prob."""
    flipped = copy.deepcopy(given)
    exchange = flipped.tape.exchanges[1]
    exchange.output_log_probs_O = exchange.output_log_probs_O.copy()
    exchange.output_log_probs_O.view(np.int64)[2] ^= 1
    return flipped


def break_prompt(given: Run) -> Run:
    """What a broken session path does: the history is the same, one id of the prompt is not."""
    broken = copy.deepcopy(given)
    exchange = broken.tape.exchanges[2]
    exchange.appended_ids_P = exchange.appended_ids_P.copy()
    exchange.appended_ids_P[-1] ^= 1
    return broken


@pytest.mark.parametrize("own", ["v1", "v2"])
def test_three_runs_of_one_conversation_are_equal(tito, own):
    other = {"v1": "v2", "v2": "v1"}[own]
    found = judge(tito, run(tito, own), run(tito, own), run(tito, other))
    assert ("equal", None, [], 0) == (found.verdict, found.reason, found.paths, found.max_ulp)


@pytest.mark.parametrize(("repeats", "verdict"), [(True, "differs"), (False, "not_comparable")])
def test_an_engine_that_moves_a_bit_is_told_from_a_path_and_judged_by_what_it_promises(tito, repeats, verdict):
    found = judge(tito, run(tito, "v2"), run(tito, "v2"), flip_log_prob(run(tito, "v1")), live=repeats)
    assert (verdict, "engine: v2 against v1", 2, 1) == (found.verdict, found.reason, found.token, found.max_ulp)
    (path,) = found.paths
    assert path.startswith("exchange[1].output_log_probs[2]: 0x")


def test_an_engine_that_repeats_only_alone_may_differ_under_the_batchs_load(tito):
    original = flip_log_prob(run(tito, "v2"))
    found = judge(tito, original, run(tito, "v2"), run(tito, "v1"), batch=False)
    assert "equal" == found.verdict and found.reason.startswith(
        "batch_load: batch against own path again: exchange[1]."
    )
    found = judge(tito, original, run(tito, "v2"), run(tito, "v1"))
    assert ("differs", "engine: batch against own path again") == (found.verdict, found.reason)


@pytest.mark.parametrize("repeats", [True, False])
def test_a_broken_session_path_is_named_whatever_the_engine(tito, repeats):
    found = judge(tito, run(tito, "v2"), run(tito, "v2"), break_prompt(run(tito, "v1")), live=repeats, batch=repeats)
    assert ("differs", "session_path: other path, own replay") == (found.verdict, found.reason)
    assert "exchange[2].prompt_ids[" in found.paths[0]


@pytest.mark.parametrize("field", ["sampling_seed", "sampling"])
def test_another_seed_or_parameter_for_the_same_history_is_the_session_paths(tito, field):
    broken = run(tito, "v1")
    exchange = broken.tape.exchanges[0]
    if field == "sampling_seed":
        exchange.sampling_seed += 1
    else:
        exchange.settings = {**exchange.settings, "sampling": {"temperature": 0.5}}
    found = first_difference(run(tito, "v2"), broken, tito)
    assert ("session_path", 0) == (found.kind, found.seq) and found.path.startswith(f"exchange[0].{field}")


def test_a_refusal_on_one_path_alone_is_that_paths(tito):
    refusing = run(tito, "v1")
    refusing.tape.refused["400"] = 1
    found = judge(tito, run(tito, "v2"), run(tito, "v2"), refusing)
    assert ("differs", ["refused.400: <absent> != 1"]) == (found.verdict, found.paths)
    refusing.tape.refused = {"502": 1, "engine_503": 2}  # tried again by the agent's client
    assert "equal" == judge(tito, run(tito, "v2"), run(tito, "v2"), refusing).verdict


def test_an_agent_whose_requests_differ_is_not_comparable(tito):
    late = run(tito, "v1", lambda talk: play(talk, clock="midnight"))
    found = judge(tito, run(tito, "v2"), run(tito, "v2"), late)
    assert ("not_comparable", "agent: v2 against v1") == (found.verdict, found.reason)
    assert found.paths[0].startswith("exchange[2].body.messages[")
    found = judge(tito, run(tito, "v2", lambda talk: play(talk, clock="dawn")), run(tito, "v2"), run(tito, "v1"))
    assert ("not_comparable", "agent: batch against own path again") == (found.verdict, found.reason)


def test_an_agents_own_result_that_does_not_repeat_is_not_comparable(tito):
    slow = run(tito, "v1", agent_result={"metadata": {"tool_time": 0.75}})
    found = judge(tito, run(tito, "v2"), run(tito, "v2"), slow)
    assert ("not_comparable", "agent_result") == (found.verdict, found.reason)
    assert ["sample.metadata.tool_time"] == [path.split(":")[0] for path in found.paths]


def test_samples_that_differ_behind_equal_exchanges_are_the_session_paths(tito):
    wrong = run(tito, "v1")
    wrong.rows[0]["loss_mask"] = wrong.rows[0]["loss_mask"] ^ 1
    found = judge(tito, run(tito, "v2"), run(tito, "v2"), wrong)
    assert ("differs", "session_path: v2 against v1") == (found.verdict, found.reason)
    assert found.paths[0].startswith("sample.loss_mask[0]")


def first_turn_again(talk: Conversation) -> None:
    """v1 takes the first answer back, v2 keeps it as a conversation of its own: one sample against two."""
    talk.ask(user("a"), text="x")
    talk.history = []
    talk.ask(user("a"), text="y")
    talk.ask(user("b"), text="z")


def test_runs_that_the_versions_rightly_sample_otherwise_carry_their_proof_by_path(tito):
    own, other = (run(tito, version, first_turn_again) for version in ("v2", "v1"))
    found = judge(tito, own, own, other)
    assert "equal_by_path" == found.verdict and found.reason.startswith("several samples")


def branch(talk: Conversation) -> None:
    play(talk)
    fork = talk.history
    for text in ("one", "two"):
        talk.history = fork
        try:
            talk.ask(user(text), text="1")
            talk.ask(user("more"), text="2")
        except SessionRefused:  # the agent ends with it
            return


def test_branches_that_v1_rightly_refuses_prove_nothing(tito):
    own, other = (run(tito, version, branch) for version in ("v2", "v1"))
    other.tape.refused["400"] = 1
    found = judge(tito, own, own, other)
    assert "not_comparable" == found.verdict
    assert found.reason.startswith("versions_part: exchange[5]: v1 answers 400: rollback failed")


def test_where_replay_itself_shows_the_versions_to_part_nothing_is_concluded(tito):
    def cut(talk: Conversation) -> None:
        talk.ask(user("look"), text="half a", finish="length")

    def cut_and_on(talk: Conversation) -> None:
        cut(talk)
        talk.ask(user("go on"), text="ok")

    found = judge(tito, run(tito, "v1", cut_and_on), run(tito, "v1", cut_and_on), run(tito, "v2", cut))
    assert "not_comparable" == found.verdict and found.reason.startswith("versions_part: exchange[1]: v2 answers 409")


def test_a_run_without_an_engine_proves_nothing(tito):
    lost = run(tito, "v1", failure=Failure(type="engine_error", message="gone"))
    found = judge(tito, run(tito, "v2"), run(tito, "v2"), lost)
    assert ("not_comparable", "run_failed: engine_error: gone") == (found.verdict, found.reason)


def test_the_choice_is_the_same_each_time_and_grows_with_the_fraction():
    chosen = {share: {k for k in range(4000) if is_chosen(7, k, share)} for share in (0.0, 0.1, 0.5, 1.0)}
    assert set() == chosen[0.0] and chosen[0.1] < chosen[0.5] < chosen[1.0] == set(range(4000))
    assert 300 < len(chosen[0.1]) < 500
    assert chosen[0.1] != {k for k in range(4000) if is_chosen(8, k, 0.1)}


@pytest.mark.parametrize(
    ("told", "repeats"),
    [
        ({}, "never"),
        ({"enable_deterministic_inference": False, "disable_radix_cache": True, "device": "cuda"}, "never"),
        ({"enable_deterministic_inference": True, "disable_radix_cache": False, "device": "cuda"}, "never"),
        ({"enable_deterministic_inference": True, "disable_radix_cache": True, "device": "cuda"}, "always"),
        ({"enable_deterministic_inference": True, "disable_radix_cache": True, "device": "cpu"}, "alone"),
        ({"enable_deterministic_inference": True, "disable_radix_cache": True}, "always"),
    ],
)
def test_an_engine_repeats_itself_as_it_was_started(told, repeats):
    assert repeats == read_repeats(told)
