"""The built-in agents against a fake model that misbehaves: what they ask again, and where they stop."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from loopback import served

from rollout.agents import branching, single_turn, tool_loop
from rollout.agents.openai_client import close_connections
from rollout.agents.tools import TOOLS
from rollout.engine.tiny.phrases import BRANCH_FIRST, BRANCH_SECOND, REASK

PROMPT = [{"role": "user", "content": "What is 1 + 2?"}]
ANSWER = ({"role": "assistant", "content": "Answer: 3"}, "stop")
BROKEN = ({"role": "assistant", "content": '<tool_call>\n{"name": "calculator"\n</tool_call>'}, "stop")
CUT = ({"role": "assistant", "content": "Hmm"}, "length")
FULL = (400, "context_length_exceeded")


def call(expression, n=1):
    function = {"name": "calculator", "arguments": f'{{"expression": "{expression}"}}'}
    calls = [{"id": f"call_{k}", "type": "function", "function": function} for k in range(n)]
    return ({"role": "assistant", "content": "", "tool_calls": calls}, "tool_calls")


@asynccontextmanager
async def faulty_model(replies):
    """Serves `replies` one after the other, the last one for ever; gives its URL and the bodies that it got."""
    bodies = []

    async def chat(request):
        bodies.append(await request.json())
        reply, ending = replies[min(len(bodies), len(replies)) - 1]
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "no", "type": "x", "code": ending}}, status=reply)
        choice = {"index": 0, "message": reply, "finish_reason": ending}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with served(app) as url:
        try:
            yield url, bodies
        finally:
            await close_connections()


async def play(agent, *replies, tools=TOOLS, metadata=None):
    async with faulty_model(replies) as (url, bodies):
        result = await agent.run(
            url, list(PROMPT), {"max_tokens": 9, "top_k": 4}, metadata or {}, api_key="k", tools=tools
        )
    return result and result["metadata"], bodies


@pytest.mark.parametrize(
    ("replies", "ending", "asked", "calls", "errors"),
    [
        ([ANSWER], "answer", 1, 0, 0),
        ([call("1 + 2"), ANSWER], "answer", 2, 1, 0),
        ([call("1 + 2", n=2), ANSWER], "answer", 2, 2, 0),
        ([call("one + 2"), call("1 + 2"), ANSWER], "answer", 3, 2, 1),
        ([BROKEN, call("1 + 2"), ANSWER], "answer", 3, 1, 0),
        ([call("1 + 2"), CUT], "cut", 2, 1, 0),
        ([call("1 + 2"), FULL], "full", 2, 1, 0),
        ([FULL], "full", 1, 0, 0),
        ([call("1 + 2")], "turns", tool_loop.MAX_TURNS, tool_loop.MAX_TURNS, 0),
        ([BROKEN], "turns", tool_loop.MAX_TURNS, 0, 0),
    ],
)
async def test_a_tool_loop_asks_again_until_an_answer_or_a_limit(replies, ending, asked, calls, errors):
    metadata, bodies = await play(tool_loop, *replies)
    assert {"ending": ending, "tool_calls": calls, "tool_errors": errors} == metadata
    assert asked == len(bodies)


async def test_a_tool_loop_appends_results_and_re_asks_in_the_models_words():
    _, bodies = await play(tool_loop, BROKEN, call("1 + 2"), call("1 / 2"), ANSWER)
    assert [
        *PROMPT,
        BROKEN[0],
        {"role": "user", "content": REASK},
        call("1 + 2")[0],
        {"role": "tool", "tool_call_id": "call_0", "content": "3"},
        call("1 / 2")[0],
        {"role": "tool", "tool_call_id": "call_0", "content": "error: write it as a + b"},
    ] == bodies[-1]["messages"]
    assert (9, 4, TOOLS) == (bodies[0]["max_tokens"], bodies[0]["top_k"], bodies[0]["tools"])


async def test_a_lookup_reads_the_rows_table():
    function = {"name": "lookup", "arguments": '{"key": "Oslo"}'}
    ask = (
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        "x",
    )
    _, bodies = await play(tool_loop, ask, ANSWER, metadata={"table": {"Oslo": 7}})
    assert "7" == bodies[-1]["messages"][-1]["content"]


async def test_any_other_refusal_ends_the_agent():
    with pytest.raises(Exception, match="429"):
        await play(tool_loop, call("1 + 2"), (429, "max_turns"))


async def test_branching_goes_back_to_one_prefix_for_its_second_conversation():
    metadata, bodies = await play(branching, call("1 + 2"), ANSWER, ANSWER)
    questions = [[m["content"] for m in body["messages"] if m["role"] == "user"][1:] for body in bodies]
    first, second = BRANCH_FIRST
    assert [[], [], [first], [first, second], [*BRANCH_SECOND]] == questions
    prefix = bodies[2]["messages"][:-1]
    assert prefix == bodies[4]["messages"][:-1]
    assert {"endings": ["answer"] * 3, "tool_calls": 1, "tool_errors": 0} == metadata


async def test_branching_without_an_answer_to_go_on_from_does_not_branch():
    metadata, bodies = await play(branching, CUT)
    assert (["cut"], 1) == (metadata["endings"], len(bodies))


async def test_branching_leaves_a_cut_conversation_and_still_goes_back():
    metadata, bodies = await play(branching, ANSWER, CUT, ANSWER)
    assert (["answer", "cut", "answer"], 3) == (metadata["endings"], len(bodies))


async def test_single_turn_asks_once_and_sends_tools_only_where_there_are_some():
    _, bodies = await play(single_turn, call("1 + 2"))
    assert (1, TOOLS) == (len(bodies), bodies[0]["tools"])
    _, bodies = await play(single_turn, ANSWER, tools=None)
    assert "tools" not in bodies[0]
