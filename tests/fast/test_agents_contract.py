"""The agent contract: found by entry points, checked before a rollout runs, ended at its deadline."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rollout.agents.contract import Agent, load_agent, load_agents, request_kwargs, run_agent
from rollout.errors import BadInput, RolloutFailure, UnknownPart
from rollout.outcome import RolloutInput
from rollout.parts import AGENTS, list_parts
from rollout.session.client import OpenedSession

SESSION = OpenedSession(session_id="s", session_key="key", base_url="http://127.0.0.1:7/sessions/s", instance_id="9")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of one module with entry points, as pip would leave it on the path."""

    def put(package, code, **entries):
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("[rollout.agents]\n" + "\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


async def play(run, *, timeout_s=5.0, max_seq_len=None, **changes):
    given = RolloutInput(**{"index": 0, "group_index": 0, "messages": [{"role": "user", "content": "q"}], **changes})
    agent = Agent(name="test", run=run)
    return await run_agent(agent, given, SESSION, sampling={}, max_seq_len=max_seq_len, timeout_s=timeout_s)


async def failure(run, **options):
    with pytest.raises(RolloutFailure) as caught:
        await play(run, **options)
    return caught.value.failure


def test_the_built_in_agents_come_the_same_way_as_anybodys():
    found = {part.name: part for part in list_parts(AGENTS)}
    assert {"single_turn", "tool_loop", "branching"} <= set(found)
    assert {None} == {found[name].problem for name in ("single_turn", "tool_loop", "branching")}
    assert ("rollout.agents.branching:run", "v2") == (found["branching"].target, load_agent("branching").needs)


def test_an_unknown_agent_is_refused_with_a_list_of_what_is_installed():
    with pytest.raises(UnknownPart, match=r"no agent 'nobody' is installed .*branching, .*single_turn, tool_loop"):
        load_agent("nobody")


def test_a_part_that_cannot_be_loaded_is_reported_and_stops_only_its_user(install):
    install("broken-pkg", "import no_such_module_here\n", lame="run")
    problems = {part.name: (part.package, part.problem) for part in list_parts(AGENTS) if part.problem}
    assert "broken-pkg 1.0" == problems["lame"][0]
    assert "ModuleNotFoundError" in problems["lame"][1]
    assert load_agent("single_turn")
    with pytest.raises(UnknownPart, match=r"agent 'lame' of broken-pkg 1.0 cannot be loaded .*no_such_module_here"):
        load_agent("lame")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("run = 3\n", "is a int, not a function"),
        ("def run(prompt): ...\n", "cannot be called: too many positional arguments; it must be run\\(base_url"),
        ("async def run(a, b, c, d): ...\n", "unexpected keyword argument 'api_key'"),
        ("needs = 'v3'\ndef run(a, b, c, d, **kwargs): ...\n", "needs 'v3'; the session versions are v1, v2"),
    ],
)
def test_a_wrong_agent_is_refused_when_it_is_loaded(install, code, message):
    install("wrong-pkg", code, wrong="run")
    with pytest.raises(UnknownPart, match=message):
        load_agent("wrong")


def test_an_agent_that_two_packages_offer_is_refused_with_both_names(install):
    install("pkg-one", "def run(a, b, c, d, **kwargs): ...\n", same="run")
    install("pkg-two", "def run(a, b, c, d, **kwargs): ...\n", same="run")
    with pytest.raises(UnknownPart, match=r"offered twice: pkg-one 1.0 \(pkg_one:run\), pkg-two 1.0"):
        load_agent("same")


def test_needs_is_read_from_the_function_and_from_its_module(install):
    install("needy", "def run(a, b, c, d, **kwargs): ...\nrun.needs = 'v1'\nneeds = 'v2'\n", needy="run")
    assert "v1" == load_agent("needy").needs
    assert ["needy", "tool_loop"] == list(load_agents(["tool_loop", "needy", "tool_loop"], "v1"))


def test_an_agent_that_needs_v2_is_refused_on_v1():
    with pytest.raises(
        BadInput, match="'branching' needs session version v2, the batch has v1: set session_version=v2"
    ):
        load_agents(["single_turn", "branching"], "v1")


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        (
            {"max_new_tokens": 5, "min_new_tokens": 1, "sampling_seed": 3},
            {"max_tokens": 5, "min_tokens": 1, "seed": 3},
        ),
        ({"max_new_tokens": 5, "max_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 7, "max_new_tokens": 5}, {"max_tokens": 7}),
        ({"temperature": 0.0, "top_k": -1, "top_p": None}, {"temperature": 0.0, "top_k": -1}),
        ({"model": "m", "messages": [], "lora": "x", "spaces_between": True}, {}),
    ],
)
def test_c12_request_kwargs_have_their_chat_names(sampling, sent):
    assert sent == request_kwargs(sampling)


async def test_c12_an_agent_gets_copies_of_its_row_and_its_result_goes_through_json():
    given = {"messages": [{"role": "user", "content": "q"}], "metadata": {"a": {"b": 1}}, "tools": [{"x": 1}]}
    seen = {}

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
        seen.update(base_url=base_url, metadata=dict(metadata), kwargs=dict(kwargs))
        prompt.append("changed")
        metadata["a"]["b"] = 2
        kwargs["tools"].clear()
        return {"reward": 1.5, "metadata": {"t": (1, 2)}, 3: "three"}

    result = await play(run, max_seq_len=64, label="4", **given)
    assert {"reward": 1.5, "metadata": {"t": [1, 2]}, "3": "three"} == result
    assert ([{"role": "user", "content": "q"}], {"a": {"b": 1}}, [{"x": 1}]) == tuple(given.values())
    assert SESSION.base_url == seen["base_url"]
    assert {
        "a": {"b": 2},
        "max_seq_len": 64,
        "session_server_id": "127.0.0.1:7",
        "session_server_instance_id": "9",
    } == seen["metadata"]
    assert {"api_key": "key", "tools": [], "label": "4"} == seen["kwargs"]


async def ended_user_threads(timeout_s=3.0):
    """Whether no thread of a user's function is left after a while."""
    for _ in range(int(timeout_s / 0.05)):
        if not [thread for thread in threading.enumerate() if thread.name == "rollout user call"]:
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_busy_agent_is_interrupted_and_named(monkeypatch, caplog, kind):
    monkeypatch.setattr("rollout.user_call.GRACE_S", 0.05)

    def spin(*args, **kwargs):
        while True:
            sum(range(100))

    async def spin_async(*args, **kwargs):
        spin()

    beats = 0

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    heart = asyncio.create_task(beat())
    found = await failure(spin if kind == "plain" else spin_async, timeout_s=0.5)
    heart.cancel()
    assert "deadline" == found.type and " in spin" in found.message
    assert beats >= 10
    assert await ended_user_threads()
    assert "is left behind, at fast/test_agents_contract.py" in caplog.text


@pytest.mark.parametrize("kind", ["plain", "async", "to_thread"])
async def test_child_processes_that_an_agent_leaves_behind_are_ended(kind):
    started = []

    def start():
        started.append(subprocess.Popen(["sh", "-c", "sleep 61 & sleep 62"]))
        time.sleep(0.1)

    async def run(*args, **kwargs):
        if kind == "to_thread":
            await asyncio.to_thread(start)
        else:
            start()

    other = subprocess.Popen(["sleep", "63"])
    await play((lambda *args, **kwargs: start()) if kind == "plain" else run)
    started[0].wait(1)
    assert not [line for line in processes() if line in ("sleep 61", "sleep 62")]
    assert other.poll() is None
    other.kill()
    other.wait()


def processes():
    """Command lines of all processes."""
    return subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout.splitlines()


async def test_an_agent_that_waits_for_a_program_is_freed_at_its_deadline():
    def waits(*args, **kwargs):
        subprocess.run(["sleep", "64"], check=True)

    assert "deadline" == (await failure(waits, timeout_s=0.3)).type
    assert await ended_user_threads()
    assert "sleep 64" not in processes()


async def test_a_fork_that_an_agent_lets_run_on_ends_there():
    def forks(*args, **kwargs):
        if os.fork():
            time.sleep(0.1)
            return {"metadata": {"parent": True}}
        return {"metadata": {"parent": False}}

    assert {"metadata": {"parent": True}} == await play(forks)


async def test_tasks_that_an_agent_leaves_behind_are_cancelled():
    ended = []

    async def run(*args, **kwargs):
        async def late():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        kwargs["late"] = asyncio.create_task(late())
        await asyncio.sleep(0)

    await play(run)
    assert ended


async def test_a_blocked_plain_agent_holds_up_neither_the_loop_nor_the_others():
    def blocked(*args, **kwargs):
        time.sleep(1.5)

    def quick(*args, **kwargs):
        return {"reward": 1}

    begun = time.monotonic()
    waiting = [asyncio.create_task(failure(blocked, timeout_s=0.2)) for _ in range(40)]
    await asyncio.sleep(0)
    assert {"reward": 1} == await play(quick)
    assert time.monotonic() - begun < 1.0
    assert {"deadline"} == {(await task).type for task in waiting}


async def test_an_agent_that_hangs_is_cancelled_at_its_deadline():
    ended = []

    async def hangs(*args, **kwargs):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    found = await failure(hangs, timeout_s=0.1)
    assert "deadline" == found.type
    assert re.fullmatch(r"the agent was still running after 0\.1 s at fast/test_agents_\S+:\d+ in hangs", found.message)
    assert ended


async def test_an_agent_is_never_interrupted_while_its_loop_is_made(monkeypatch):
    """A half-made loop cannot be closed, and what its coroutine says then is no answer to anybody."""
    make, made = asyncio.new_event_loop, []

    def slow_loop():
        time.sleep(0.2)
        for _ in range(1000):  # steps of Python, where an interruption would land
            pass
        made.append(make())
        return made[-1]

    async def agent(base_url, prompt, request_kwargs, metadata, **kwargs):
        raise AssertionError("it was cancelled before it began")

    monkeypatch.setattr("rollout.user_call.asyncio.new_event_loop", slow_loop)
    assert "deadline" == (await failure(agent, timeout_s=0.05)).type
    monkeypatch.undo()
    assert 1 == len(made)
    deadline = time.monotonic() + 5
    while not made[0].is_closed() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert made[0].is_closed()


async def test_an_agent_that_swallows_its_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr("rollout.user_call.GRACE_S", 0.05)

    async def stubborn(*args, **kwargs):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    begun = time.monotonic()
    assert "deadline" == (await failure(stubborn, timeout_s=0.1)).type
    assert time.monotonic() - begun < 1.0
    assert await ended_user_threads()


def raising(error):
    async def run(*args, **kwargs):
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "kind", "message"),
    [
        (raising(ValueError("boom\nbang")), "agent_error", "ValueError: boom bang"),
        (raising(SystemExit(3)), "agent_error", "Quit: SystemExit: 3"),
        (raising(asyncio.CancelledError()), "agent_error", "Quit: it was cancelled from inside"),
        (raising(TimeoutError("10 s")), "agent_timeout", "TimeoutError: 10 s"),
        (lambda *a, **k: sys.exit(3), "agent_error", "Quit: SystemExit: 3"),
        (lambda *a, **k: next(iter(())), "agent_error", "RuntimeError: StopIteration"),
        (lambda *a, **k: "text", "agent_error", "TypeError: an agent returns a dict or None, not str"),
        (lambda *a, **k: {"metadata": [1]}, "agent_error", "TypeError: an agent's metadata is a dict, not list"),
        (lambda *a, **k: {"x": float("nan")}, "agent_error", "ValueError: the agent's result is not JSON"),
        (lambda *a, **k: {"x": "\ud800"}, "agent_error", "ValueError: the agent's result is not JSON"),
        (lambda *a, **k: {"x": np.zeros(2)}, "agent_error", "ValueError: the agent's result is not JSON"),
    ],
)
async def test_whatever_an_agent_does_is_a_typed_failure(run, kind, message):
    found = await failure(run)
    assert kind == found.type
    assert found.message.startswith(message)


async def test_a_wrapped_timeout_is_the_agents_own():
    async def run(*args, **kwargs):
        try:
            raise TimeoutError
        except TimeoutError as error:
            raise RuntimeError("no answer from the tool server") from error

    assert "agent_timeout" == (await failure(run)).type


async def test_a_cancelled_driver_cancels_its_agent():
    ended = []

    async def hangs(*args, **kwargs):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    task = asyncio.create_task(play(hangs))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


def test_loading_the_built_in_agents_imports_no_openai():
    """A dry run loads agents to check them and answers in half a second; importing openai alone takes as long."""
    names = [part.name for part in list_parts(AGENTS) if part.package.startswith("rollout-lake ")]
    code = f"import sys\nfrom rollout.agents.contract import load_agent\n[load_agent(n, 'true') for n in {names}]\n"
    code += "sys.exit('openai' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
