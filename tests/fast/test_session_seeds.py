"""A turn's seed: the session's seed, the prompt, and how often that prompt was sampled."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from scripted import Conversation, tiny_tito, user

TITO = tiny_tito()


def by_the_books(seed: str, prompt: list[int], count: int) -> int:
    prompt_digest = blake2b(np.array(prompt, "<i4").tobytes(), digest_size=16).digest()
    digest = blake2b(bytes.fromhex(seed) + prompt_digest + count.to_bytes(4, "little"), digest_size=16).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def test_committed_and_running_generations_of_a_prompt_count() -> None:
    for version in ("v1", "v2"):
        talk = Conversation(TITO, version, seed="00ff")
        first = talk.begin([user("a")], seed=3)
        second = talk.begin([user("a")])
        assert by_the_books("00ff", first.prompt_ids, 0) == first.sampling_seed
        assert by_the_books("00ff", first.prompt_ids, 1) == second.sampling_seed
        talk.session.release(second)
        talk.commit(first, "ok")
        assert by_the_books("00ff", first.prompt_ids, 1) == talk.begin([user("a")]).sampling_seed


def test_a_v1_retry_differs_from_what_it_takes_back() -> None:
    talk = Conversation(TITO, "v1", seed="01")
    talk.ask(user("a"))
    start = talk.history
    talk.ask(user("b"))
    talk.history = start
    talk.ask(user("b"))
    seeds = [exchange.sampling_seed for exchange in talk.session.tape().exchanges]
    assert 3 == len(set(seeds))
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_another_prompt_has_another_seed_and_the_same_session_repeats() -> None:
    talks = [Conversation(TITO, "v2", seed="0a") for _ in range(2)]
    for talk in talks:
        talk.ask(user("a"))
        talk.ask(user("b"))
    first, second = ([e.sampling_seed for e in talk.session.tape().exchanges] for talk in talks)
    assert first == second
    assert first[0] != first[1]


def test_without_a_seed_of_the_session_the_clients_own_counts() -> None:
    talk = Conversation(TITO, "v2")
    assert 5 == talk.begin([user("a")], seed=5).sampling_seed
    turn = talk.begin([user("a")])
    assert turn.sampling_seed is None
    assert "sampling_seed" not in turn.engine_request["sampling_params"]


def test_ids_of_tool_calls_follow_from_prompt_and_output() -> None:
    text = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
    ids = []
    for question in ("a", "a", "b"):
        talk = Conversation(TITO, "v2")
        talk.ask(user(question), text=f"{text}\n{text}", tools=[{"type": "function", "function": {"name": "lookup"}}])
        ids.append([one["id"] for one in talk.history[-1]["tool_calls"]])
    assert ids[0] == ids[1]
    assert not {*ids[0]} & {*ids[2]}
    assert 2 == len({*ids[0]})
    assert all(name.startswith("call_") and len(name) == 29 for name in ids[0])
