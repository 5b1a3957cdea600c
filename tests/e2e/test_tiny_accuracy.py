"""What the shipped checkpoint can and cannot do, played with the embedded engine's model."""

from collections import Counter

import pytest

from rollout.agents.reference_case import FIRST, INPUTS, SECOND, reference_inputs
from rollout.engine.tiny import CHECKPOINT, phrases
from rollout.engine.tiny.accuracy import make_sampler
from rollout.engine.tiny.encoding import Encoder
from rollout.engine.tiny.playing import go_on, play, put
from rollout.engine.tiny.prompts import make_prompts, mixed_prompts
from rollout.engine.tiny.tasks import TOOL_KINDS

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP = 4


@pytest.fixture(scope="module")
def encoder():
    return Encoder(CHECKPOINT)


@pytest.fixture(scope="module")
def greedy():
    return make_sampler(CHECKPOINT)


@pytest.mark.full
def test_greedily_95_percent_of_500_held_out_prompts_are_right_through_the_tools(encoder, greedy):
    games = play(make_prompts(500, seed=2, kinds=TOOL_KINDS), greedy, encoder)
    right = [game for game in games if game.right and game.called]
    wrong = Counter(game.row["metadata"]["kind"] for game in games if not (game.right and game.called))
    assert len(right) >= 475, wrong


def test_greedily_every_reference_input_calls_its_tools_and_ends_every_turn(encoder, greedy):
    games = play(reference_inputs(), greedy, encoder)
    assert [game.called for game in games] == [1] * INPUTS

    def then(*messages):
        for game in games:
            put(game, messages, encoder)
        go_on(games, greedy, encoder)
        assert not any(game.cut for game in games)

    then({"role": "user", "content": phrases.SECOND_CITY.format(city=SECOND)})
    assert [game.called for game in games] == [2] * INPUTS
    keys = {tuple(call["function"]["arguments"] for m in g.messages for call in m.get("tool_calls", [])) for g in games}
    assert keys == {(f'{{"key": "{FIRST}"}}', f'{{"key": "{SECOND}"}}')}
    then({"role": "system", "content": phrases.REMINDER})
    then({"role": "user", "content": phrases.FORCE_FINAL})
    assert all(game.right and "<final_answer>" in game.messages[-1]["content"] for game in games)
    injected = [{"role": "assistant", "content": text} for text in phrases.INJECTED]
    then(*injected, {"role": "user", "content": phrases.REPEAT_ANSWER})
    assert all(game.right and len(game.turns) == 7 for game in games)


@pytest.mark.parametrize("follow_ups", [phrases.BRANCH_FIRST, phrases.BRANCH_SECOND])
def test_greedily_both_sub_conversations_of_the_branching_agent_end_right(follow_ups, encoder, greedy):
    games = play(make_prompts(48, seed=3, kinds=TOOL_KINDS), greedy, encoder)
    for text in follow_ups:
        for game in games:
            put(game, [{"role": "user", "content": text}], encoder)
        go_on(games, greedy, encoder)
    assert sum(game.right for game in games) >= 44


def test_at_temperature_1_a_batch_has_spread_cuts_and_failed_calls(encoder):
    rows = [row for row in mixed_prompts(64, seed=4) for _ in range(GROUP)]
    games = play(rows, make_sampler(CHECKPOINT, temperature=1.0, seed=5), encoder)
    groups = [sum(game.right for game in games[place : place + GROUP]) for place in range(0, len(games), GROUP)]
    assert 0.3 < sum(groups) / len(games) < 0.9
    assert sum(0 < right < GROUP for right in groups) >= 16
    assert 2 <= sum(game.cut for game in games) <= 60
    said = [message["content"] for game in games for message in game.messages]
    assert any(content.startswith("error: ") for content in said)
    assert phrases.REASK in said
