"""Rules C16 of the reference's session server: its parity schedule, played through both versions."""

from __future__ import annotations

import pytest
from scripted import TOOLS, Conversation, call, tiny_tito, user

from rollout.parity.projections import PARITY, diff_projected
from rollout.parity.rows import row_of
from rollout.parity.verdict import judge

TITO = tiny_tito()


def scheduled(version: str) -> Conversation:
    """The nine requests: initial, tool, user, tool, system, two rollbacks, force_final, injected assistants."""
    talk = Conversation(TITO, version)

    def ask(*new: dict, text: str = "ok", tools: list | None = TOOLS) -> None:
        talk.ask(*new, text=text, **({"tools": tools} if tools else {}))

    def results(text: str) -> dict:
        (made,) = talk.history[-1]["tool_calls"]
        return {"role": "tool", "tool_call_id": made["id"], "content": text}

    ask(user("the weather in Beijing?"), text=call("Beijing"))
    ask(results("sunny"), text="It is sunny.")
    ask(user("and in Shanghai?"), text=call("Shanghai"))
    ask(results("rain"), text="It rains.")
    before = list(talk.history)
    ask({"role": "system", "content": "be brief"}, text="Brief.")
    for attempt in ("first", "second"):
        talk.history = list(before)
        ask(user(f"{attempt} other question"), text=f"The {attempt} answer.")
    ask(user("your final answer"), text="Rain.", tools=None)
    carried = {"role": "assistant", "content": "an answer of another model"}
    ask(carried, user("go on"), carried, user("end"), text="Done.")
    return talk


def test_c16_v1_ends_with_seven_records_and_v2_with_nine_nodes_and_three_leaves() -> None:
    v1, v2 = scheduled("v1").session, scheduled("v2").session
    assert (7, 7) == (len(v1.active_path()), len(v2.active_path()))
    tree = v2.metadata()["tree"]
    assert (9, [4, 5, 8]) == (len(tree["nodes"]), [leaf["node_id"] for leaf in tree["leaves"]])
    paths = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 6, 7, 8]]
    assert paths == [leaf["path_node_ids"] for leaf in tree["leaves"]]
    assert [paths[2]] == [sample.leaf_path for sample in v2.samples().samples]


def test_c16_both_versions_give_one_sample_that_is_the_same_bit_for_bit() -> None:
    talks = [scheduled(version) for version in ("v1", "v2")]
    one, two = (talk.result().samples for talk in talks)
    assert (1, 1, 7) == (len(one), len(two), one[0].turns)
    assert [] == diff_projected(row_of(one[0]), row_of(two[0]), PARITY)
    views = [talk.session.metadata() for talk in talks]
    del views[1]["tree"]
    assert views[0] == views[1]
    assert ["Beijing", "Shanghai"] == [key for key in ("Beijing", "Shanghai") if f'"key": "{key}"' in one[0].response]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_c16_the_schedule_is_judged_equal_from_either_version_and_one_bit_is_seen(version: str) -> None:
    result = scheduled(version).result()
    assert "equal" == judge(result.tape, result.outcome, result.samples, TITO).verdict
    result.samples[0].rollout_log_probs_R[0] = -result.samples[0].rollout_log_probs_R[0]
    found = judge(result.tape, result.outcome, result.samples, TITO)
    assert ("differs", 1) == (found.verdict, len(found.paths))
