"""Recorded turns for another engine, and what is made of its answers."""

from collections import Counter

import numpy as np
from scripted import Conversation, tiny_tito, user

from rollout.batch.tapes import spread
from rollout.engine.generation import Generation
from rollout.parity.cross import judge_cross, turn_request
from rollout.parity.cross_report import CrossReport, bars, headline, markdown, svg
from rollout.parity.ulp import FAR

TITO = tiny_tito()
END = TITO.tokenizer.control_ids["<|im_end|>"]


def recorded(**settings):
    talk = Conversation(TITO, "v2", seed="ab", **settings)
    talk.ask(user("one"), text="ok")
    talk.ask(user("two"), text="half", finish="length")
    return talk.session.tape()


def answers(tape):
    return [
        Generation(output_ids_O=e.output_ids_O, output_log_probs_O=e.output_log_probs_O, finish=e.finish)
        for e in tape.exchanges
    ]


def changed(answer, *, token=None, ulp=0):
    ids, log_probs = answer.output_ids_O.copy(), answer.output_log_probs_O.copy()
    if token is not None:
        ids[token] ^= 1
    log_probs.view(np.int64)[:1] += ulp
    return Generation(output_ids_O=ids, output_log_probs_O=log_probs, finish="stop")


def test_a_turn_is_asked_as_it_was_with_its_seed_and_room_for_one_token_more():
    tape = recorded(sampling={"temperature": 0.7, "top_k": 5, "max_new_tokens": 99, "stop_token_ids": [3]}, lora="x")
    first, second = (turn_request(tape, seq, stop_token_ids=[END, 3]) for seq in (0, 1))
    params = {"temperature": 0.7, "top_k": 5, "stop_token_ids": [3, END]}
    n_first, n_second = (len(exchange.output_ids_O) for exchange in tape.exchanges)
    seeds = [exchange.sampling_seed for exchange in tape.exchanges]
    assert {**params, "max_new_tokens": n_first + 1, "sampling_seed": seeds[0]} == first["sampling_params"]
    assert {**params, "max_new_tokens": n_second, "sampling_seed": seeds[1]} == second["sampling_params"]
    assert (True, "x") == (first["return_logprob"], first["lora_path"])
    prompt = [*tape.exchanges[0].appended_ids_P, *tape.exchanges[0].output_ids_O, *tape.exchanges[1].appended_ids_P]
    assert prompt == second["input_ids"] and set(map(type, second["input_ids"])) == {int}


def test_the_same_answers_are_equal():
    tape = recorded()
    found = judge_cross(tape, answers(tape), index=3, rollout_key=30)
    assert ("equal", None, [], None, 0) == (found.verdict, found.reason, found.paths, found.position, found.max_ulp)
    assert 2 == found.n_turns and found.n_tokens == found.n_shared > 2


def test_the_first_token_and_the_first_bit_are_named_with_their_turns():
    tape = recorded()
    first, second = answers(tape)
    found = judge_cross(tape, [changed(first, ulp=1), changed(second, token=0)], index=3, rollout_key=30)
    assert ("differs", "tokens", 1) == (found.verdict, found.reason, found.max_ulp)
    assert (1, 0, 0, 0) == (
        found.first_token.turn,
        found.first_token.token,
        found.first_log_prob.turn,
        found.first_log_prob.token,
    )
    assert len(first.output_ids_O) == found.position and 1 == found.n_turns_parted
    assert found.paths[0].startswith("exchange[1].output_ids[0]: ")
    assert found.paths[1].startswith("exchange[0].output_log_probs[0]: 0x")
    bits = judge_cross(tape, [changed(first, ulp=5), second], index=3, rollout_key=30)
    assert ("differs", "log_probs", 5, None) == (bits.verdict, bits.reason, bits.max_ulp, bits.first_token)


def report(*verdicts):
    made = CrossReport(batch_id="b", engine_a="a <1>", engine_b="b|2", n_rollouts=9)
    for verdict in verdicts:
        made.add(verdict)
    return made


def test_a_report_counts_in_bins_that_double():
    made = report()
    made.ulps = {"float32": Counter({0: 5, 1: 2, 2: 1, 3: 1, 9: 4, FAR: 1})}
    assert [("0", 5), ("1", 2), ("2-3", 2), ("4-7", 0), ("8-15", 4), ("NaN", 1)] == [
        (one.label, one.n) for one in made.histogram("float32")
    ]
    assert [40, 16, 16, 0, 32, 8] == [len(bar) for _, _, bar in bars(made.histogram("float32"))]
    assert [] == made.histogram("float64")


def test_a_report_in_words_and_as_a_picture():
    tape = recorded()
    first, second = answers(tape)
    same = judge_cross(tape, [first, second], index=0, rollout_key=0)
    moved = judge_cross(tape, [changed(first, ulp=3), changed(second, token=0)], index=1, rollout_key=1)
    made = report(same, moved)
    assert made.differs and {"differs: tokens": 1, "equal": 1} == made.counts()
    assert "2 of 9, 4 turns" == dict(headline(made))["rollouts"]
    text = markdown(made)
    assert "a &lt;1&gt;" in text and "b\\|2" in text and "| 2-3 | 1 | █" in text
    assert "| 1 | differs: tokens | exchange[1].output_ids[0]" in text
    assert svg(made).startswith("<svg ") and 2 + len(made.histogram("float64")) - 1 == svg(made).count("<rect ")
    assert not report(same).differs


def test_a_few_rollouts_are_spread_over_all():
    assert [0, 2, 5, 7] == spread(range(10), 4)
    assert [3, 4] == spread([3, 4], 5) == spread([3, 4], None)
