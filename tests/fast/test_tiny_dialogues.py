"""Dialogues and prompts: seeded, rendered as a session would have grown them, training apart from tests."""

import json
import random

import pytest

from rollout.agents.reference_case import FIRST, SECOND, reference_inputs
from rollout.agents.tools import run_tool
from rollout.engine.tiny import CHECKPOINT
from rollout.engine.tiny.dialogues import converse, make_dialogue
from rollout.engine.tiny.encoding import Encoder
from rollout.engine.tiny.prompts import DEMO_COUNT, DEMO_FILE, demo_lines, held_out, make_prompts, mixed_prompts
from rollout.engine.tiny.tasks import MAKERS, TOOL_KINDS, make_task


@pytest.fixture(scope="module")
def encoder():
    return Encoder(CHECKPOINT)


def test_one_seed_gives_one_sequence_of_dialogues():
    first, second, other = ([make_dialogue(random.Random(seed)) for _ in range(50)] for seed in (7, 7, 8))
    assert first == second != other


@pytest.mark.parametrize("kind", MAKERS)
def test_growing_turn_by_turn_gives_the_ids_of_the_whole_history(kind, encoder):
    rng = random.Random(3)
    for _ in range(40):
        _, dialogue = make_dialogue(rng, (kind,))
        grown = encoder.encode(dialogue)
        whole = encoder.renderer.render_ids(dialogue.messages, tools=dialogue.tools)
        assert [*grown.tokens_T.tolist(), *encoder.tokenizer.encode("\n")] == whole


@pytest.mark.parametrize("kind", MAKERS)
def test_the_loss_covers_what_the_model_says_and_no_more(kind, encoder):
    stop = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    rng = random.Random(4)
    for _ in range(20):
        _, dialogue = make_dialogue(rng, (kind,))
        grown = encoder.encode(dialogue)
        spoken = [int(token) for token, mask in zip(grown.tokens_T, grown.mask_T, strict=True) if mask]
        said = [encoder.completion(dialogue.messages[place]) for place in dialogue.sampled]
        assert spoken == [token for turn in said for token in turn]
        assert spoken.count(stop) == len(said)


@pytest.mark.parametrize("kind", MAKERS)
def test_without_habits_a_dialogue_ends_with_the_right_answer(kind):
    rng = random.Random(5)
    for follow_up in (0, 1, 2) * 10:
        task = make_task(rng, (kind,))
        dialogue = converse(task, rng, habits=False, follow_up=follow_up if kind in TOOL_KINDS else 0)
        answer = task.label if not task.guesses else dialogue.messages[-1]["content"].rsplit(" ", 1)[-1]
        assert dialogue.messages[-1]["content"].rsplit("\n", 1)[-1] == f"Answer: {answer}"
        assert not task.guesses or answer in task.guesses


def test_tool_messages_are_what_the_tools_answer():
    rng = random.Random(6)
    for _ in range(300):
        task, dialogue = make_dialogue(rng)
        calls = [call["function"] for message in dialogue.messages for call in message.get("tool_calls", [])]
        results = [message["content"] for message in dialogue.messages if message["role"] == "tool"]
        assert results == [run_tool(call["name"], call["arguments"], task.table) for call in calls]


def test_the_shipped_prompts_are_the_generators():
    assert DEMO_FILE.read_text() == demo_lines()


def test_the_shipped_prompts_use_every_built_in_agent_and_were_never_trained_on():
    rows = [json.loads(line) for line in DEMO_FILE.read_text().splitlines()]
    assert len(rows) == DEMO_COUNT
    assert {row["agent"] for row in rows} == {"single_turn", "tool_loop", "branching"}
    assert all(held_out(row["messages"]) for row in rows)
    assert all(("tools" in row) == (row["agent"] != "single_turn") for row in rows)
    assert all(set(row) <= {"messages", "tools", "label", "metadata", "agent"} for row in rows)


def test_prompts_are_different_and_repeat_by_seed():
    rows = mixed_prompts(200, seed=1)
    assert len({json.dumps(row["messages"]) for row in rows}) == 200
    assert rows == mixed_prompts(200, seed=1) != mixed_prompts(200, seed=2)
    assert {row["metadata"]["kind"] for row in make_prompts(200, seed=1)} == set(TOOL_KINDS)


def test_the_reference_inputs_are_16_rows_with_both_cities():
    rows = reference_inputs()
    assert len({json.dumps(row["messages"]) for row in rows}) == 16
    for row in rows:
        table = row["metadata"]["table"]
        assert row["label"] == f"{FIRST} {table[FIRST]}, {SECOND} {table[SECOND]}"
        assert held_out(row["messages"])
