"""Sessions that an earlier process left: known at once, restored when they are asked for or in their turn."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from app_stage import app_stage
from faulty_engine import wait_until
from left_journal import TITO, LeftBehind, key, spoken
from scripted import user
from session_stage import Stage

from rollout.errors import SessionRefused
from rollout.session import restoring as module
from rollout.session.events import EventLog
from rollout.session.journal import Journal
from rollout.session.keeping import Keeping
from rollout.session.left import LeftSession
from rollout.session.live import LiveSession, LiveSessions
from rollout.session.metrics import Metrics
from rollout.session.restoring import Restoring
from rollout.session.tape import tape_to_table

TOKEN = "driver-secret"
IDS = [f"{number:032x}" for number in range(5)]
LAST = IDS[-1]


class Restarted:
    """What a server has of its sessions once it has looked at its journal; nothing is restored until `restore` runs."""

    def __init__(self, folder: Path, *, idle_s: float = 60.0, max_sessions: int = 9) -> None:
        self.now = 0.0
        self.log = folder.parent / f"{folder.name}.log"
        self.journal, self.metrics = Journal(folder), Metrics()
        self.sessions = LiveSessions(TOKEN, max_sessions=max_sessions, idle_s=idle_s, clock=lambda: self.now)
        self.restoring = Restoring(
            Keeping(self.journal, self.sessions, self.metrics),
            self.sessions,
            TITO,
            metrics=self.metrics,
            events=EventLog("json", os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)),
        )
        self.restoring.find()

    def events(self, name: str) -> list[str]:
        """The sessions of which an event told, in order."""
        lines = map(orjson.loads, self.log.read_bytes().splitlines())
        return [line["session_id"] for line in lines if line["event"] == name]

    def ask(self, session_id: str) -> asyncio.Task[LiveSession]:
        return asyncio.create_task(self.restoring.for_client(session_id, [key(session_id)]))

    def files(self) -> list[str]:
        return sorted(path.stem for path in self.journal.folder.glob("*.journal"))


async def refused(work: Any) -> int:
    with pytest.raises(SessionRefused) as caught:
        await work
    return caught.value.status


@pytest.fixture
def left() -> LeftBehind:
    return spoken(4)


@pytest.fixture
def folder(tmp_path: Path, left: LeftBehind) -> Path:
    left.write(tmp_path / "journal", IDS)
    return tmp_path / "journal"


def same(live: LiveSession, left: LeftBehind) -> bool:
    return bool(tape_to_table(live.session.tape()).equals(tape_to_table(left.tape(live.session_id))))


async def test_all_come_back_as_they_were(folder: Path, left: LeftBehind) -> None:
    server = Restarted(folder)
    assert (0, IDS) == (len(server.sessions), list(server.sessions.left))
    await server.restoring.restore()
    assert not server.sessions.left
    assert IDS == sorted(live.session_id for live in server.sessions.all() if same(live, left))
    assert IDS == server.events("restored") == server.files()


async def test_what_is_asked_for_comes_first_and_two_requests_restore_it_once(folder: Path, left: LeftBehind) -> None:
    server = Restarted(folder)
    asked = [server.ask(LAST), server.ask(LAST), server.ask(IDS[3])]
    everything = asyncio.create_task(server.restoring.restore())
    one, two, other = await asyncio.gather(*asked)
    assert one is two and same(one, left) and same(other, left)
    await everything
    assert [LAST, IDS[3], *IDS[:3]] == server.events("restored")
    assert one is await server.ask(LAST)


async def test_a_request_goes_before_a_session_that_was_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)  # one step each
    server = Restarted(folder)
    everything = asyncio.create_task(server.restoring.restore())
    while server.sessions.left[IDS[0]].steps is None:
        await asyncio.sleep(0)
    await server.ask(LAST)
    assert [LAST] == server.events("restored")
    await everything
    assert [LAST, *IDS[:-1]] == server.events("restored")


async def test_a_client_that_leaves_takes_nothing_from_the_others(folder: Path, left: LeftBehind) -> None:
    server = Restarted(folder)
    gone, waits = server.ask(LAST), server.ask(LAST)
    await asyncio.sleep(0)
    gone.cancel()
    await server.restoring.restore()
    assert same(await waits, left) and gone.cancelled()


async def test_rights_are_checked_before_anything_is_restored(folder: Path) -> None:
    server = Restarted(folder)
    for tokens in ([], ["wrong"], [key(IDS[0])]):
        assert 401 == await refused(server.restoring.for_client(LAST, tokens))
    for tokens in ([], ["wrong"], [key(LAST)]):
        assert 401 == await refused(server.restoring.for_driver(LAST, tokens))
        with pytest.raises(SessionRefused, match="driver's token"):
            server.sessions.to_delete(LAST, tokens)
    assert 404 == await refused(server.restoring.for_client("f" * 32, [TOKEN]))
    assert 404 == await refused(server.restoring.for_driver("f" * 32, [TOKEN]))
    assert IDS == list(server.sessions.left)
    assert all(one.asked is None and one.steps is None for one in server.sessions.left.values())
    asked = [
        asyncio.create_task(get(LAST, [TOKEN])) for get in (server.restoring.for_client, server.restoring.for_driver)
    ]
    await server.restoring.restore()
    assert 1 == len({id(live) for live in await asyncio.gather(*asked)})


async def test_left_sessions_are_listed_and_take_room(folder: Path) -> None:
    server = Restarted(folder, max_sessions=len(IDS))
    asked = server.ask(LAST)
    await asyncio.sleep(0)
    rows = {row["session_id"]: row for row in server.sessions.rows()}
    assert IDS == sorted(rows) and all(row["restoring"] for row in rows.values())
    assert (None, None, 0, 0.0) == tuple(rows[LAST][name] for name in ("version", "turns", "running", "idle_s"))
    with pytest.raises(SessionRefused, match="as many as there may be"):
        server.sessions.check_room()
    await server.restoring.restore()
    with pytest.raises(SessionRefused, match="as many as there may be"):
        server.sessions.check_room()
    rows = {row["session_id"]: row for row in server.sessions.rows()}
    assert {("v2", 4, False)} == {(row["version"], row["turns"], row["restoring"]) for row in rows.values()}
    server.sessions.remove(await asked)
    server.sessions.check_room()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_left_session_is_deleted_without_being_restored(
    folder: Path, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    server = Restarted(folder)
    waiting = server.ask(LAST)
    everything = asyncio.create_task(server.restoring.restore())
    if begun:
        while server.sessions.left[LAST].steps is None:
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(0)
    held = server.sessions.to_delete(LAST, [TOKEN])
    assert isinstance(held, LeftSession)
    server.sessions.remove(held)
    assert 404 == await refused(waiting)
    await everything
    assert IDS[:-1] == server.files() == server.events("restored")
    assert 404 == await refused(server.ask(LAST))


async def test_left_sessions_expire_as_used_at_the_start(folder: Path) -> None:
    server = Restarted(folder, idle_s=10.0)
    server.now = 4.0
    waiting = server.ask(LAST)
    everything = asyncio.create_task(server.restoring.restore())
    first = await waiting
    while IDS[0] in server.sessions.left:
        await asyncio.sleep(0)
    everything.cancel()
    assert (6.0, 4.0) == (server.sessions.next_due_s(), first.used_at)
    asked = server.ask(IDS[-2])
    await asyncio.sleep(0)
    server.now = 10.0
    gone = {one.session_id for one in server.sessions.expire()}
    assert gone == set(IDS[:-2]), "the one that was restored unasked was not used by that"
    assert IDS[-2:] == server.files(), "one is used, a request waits for the other"
    assert 4.0 == server.sessions.next_due_s()
    await server.restoring.restore()
    assert IDS[-2] == (await asked).session_id
    server.now = 14.0
    assert [LAST] == [one.session_id for one in server.sessions.expire()]


async def test_what_does_not_come_back_is_told_and_keeps_its_file(tmp_path: Path, left: LeftBehind) -> None:
    folder = tmp_path / "journal"
    left.write(folder, IDS[:2])
    LeftBehind(talk=left.talk, context_length=3).write(folder, [LAST])
    content = (folder / f"{LAST}.journal").read_bytes()
    server = Restarted(folder)
    waiting = server.ask(LAST)
    await server.restoring.restore()
    assert 404 == await refused(waiting)
    assert ([LAST], IDS[:2]) == (server.events("not_restored"), server.events("restored"))
    assert content == (folder / f"{LAST}.journal").read_bytes()
    assert "rollout_session_sessions_not_restored_total 1" in server.metrics.text({})


async def test_a_file_that_cannot_be_read_keeps_no_other_away(folder: Path) -> None:
    (folder / f"{'e' * 32}.journal").mkdir()
    server = Restarted(folder)
    (folder / f"{IDS[0]}.journal").unlink()
    waiting = server.ask(IDS[0])
    await server.restoring.restore()
    assert 404 == await refused(waiting)
    assert (["e" * 32, IDS[0]], IDS[1:]) == (server.events("not_restored"), server.events("restored"))


async def test_a_restore_that_fails_otherwise_keeps_no_other_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Restarted(folder)
    monkeypatch.setattr(module, "restore_session", failing_for(IDS[2], module.restore_session, ZeroDivisionError()))
    await server.restoring.restore()
    assert ([IDS[2]], 4) == (server.events("not_restored"), len(server.events("restored")))
    assert IDS == server.files()


async def test_too_many_open_files_only_delay_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    server = Restarted(folder)
    monkeypatch.setattr(
        module, "restore_session", failing_for(IDS[2], module.restore_session, OSError(errno.EMFILE, ""))
    )
    await server.restoring.restore()
    assert ([], 5) == (server.events("not_restored"), len(server.events("restored")))


def failing_for(session_id: str, real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """`real`, which raises for this session the first time that it is called for it."""
    failures = [error]

    def restore(tape: Any, *args: Any, **given: Any) -> Any:
        if tape.session_id == session_id and failures:
            raise failures.pop()
        return real(tape, *args, **given)

    return restore


async def test_a_restore_that_is_stopped_leaves_no_file_open_and_all_files(
    folder: Path, left: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    server = Restarted(folder)
    everything = asyncio.create_task(server.restoring.restore())
    while server.sessions.left[IDS[0]].steps is None:
        await asyncio.sleep(0)
    assert 1 == len(open_in(folder)), "it is being read"
    everything.cancel()
    with pytest.raises(asyncio.CancelledError):
        await everything
    server.restoring.stop()
    assert [] == open_in(folder)
    server.journal.close()
    assert IDS == server.files()
    again = Restarted(folder)
    await again.restoring.restore()
    assert 5 == sum(same(live, left) for live in again.sessions.all())


def open_in(folder: Path) -> list[str]:
    """The sessions' files that this process has open."""
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [link for link in links if link.startswith(str(folder.resolve())) and link.endswith(".journal")]


@asynccontextmanager
async def held(folder: Path) -> AsyncIterator[tuple[Stage, asyncio.Event, list[LiveSessions]]]:
    """A server that restores nothing until the event is set, and its sessions."""
    begin, restore, sessions = asyncio.Event(), Restoring.restore, list[LiveSessions]()

    async def later(self: Restoring) -> None:
        sessions.append(self._sessions)
        await begin.wait()
        await restore(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Restoring, "restore", later)
        async with app_stage(journal=folder, driver_token=TOKEN) as stage:
            yield stage, begin, sessions


async def gauge(stage: Stage) -> str:
    text = (await stage.ask("GET", "/metrics"))[1].decode()
    return next(line for line in text.splitlines() if line.startswith("rollout_session_sessions_restoring "))


async def test_a_server_answers_while_it_restores(folder: Path, left: LeftBehind) -> None:
    async with held(folder) as (stage, begin, _):
        assert 5 == (await stage.ask("GET", "/health"))[1]["restoring"]
        assert "rollout_session_sessions_restoring 5" == await gauge(stage)
        new, _ = await stage.open()
        assert 200 == (await stage.chat(new, user("a")))[0]
        listed = (await stage.ask("GET", "/sessions"))[1]["sessions"]
        assert {**dict.fromkeys(IDS, True), new.split("/")[2]: False} == {
            row["session_id"]: row["restoring"] for row in listed
        }
        session = f"/sessions/{LAST}"
        assert 401 == (await stage.chat(session, user("a"), key="wrong"))[0]
        assert 401 == (await stage.ask("DELETE", session, key=key(LAST)))[0]
        assert 404 == (await stage.ask("GET", f"/sessions/{'f' * 32}"))[0]
        assert 204 == (await stage.ask("DELETE", f"/sessions/{IDS[0]}"))[0]
        assert 404 == (await stage.ask("DELETE", f"/sessions/{IDS[0]}"))[0]
        assert not (folder / f"{IDS[0]}.journal").exists()
        messages = [*left.talk.history, user("and now?")]
        waiting = asyncio.create_task(stage.chat(session, *messages, key=key(LAST)))
        shown = asyncio.create_task(stage.ask("GET", f"/sessions/{IDS[1]}"))
        done, _ = await asyncio.wait([waiting, shown], timeout=0.1)
        assert not done
        begin.set()
        assert (200, 200) == ((await waiting)[0], (await shown)[0])
        assert 5 == await stage.n_turns(session)
        async with asyncio.timeout(20):
            while (await stage.ask("GET", "/health"))[1]["restoring"]:
                await asyncio.sleep(0.01)
        assert "rollout_session_sessions_restoring 0" == await gauge(stage)


async def test_a_server_that_ends_while_a_request_waits_gives_the_folder_up(folder: Path) -> None:
    async with held(folder) as (stage, _, sessions):
        head = f"GET /sessions/{LAST} HTTP/1.1\r\nx-api-key: {TOKEN}\r\n"
        waiting = asyncio.create_task(stage.send(head.encode()))
        await wait_until(lambda: sessions[0].left[LAST].asked)
    assert b"" == await waiting
    server = Restarted(folder)
    assert IDS == list(server.sessions.left)


async def test_only_a_server_with_a_journal_speaks_of_restoring() -> None:
    async with app_stage() as stage:
        assert {"status", "session_server_instance_id"} == (await stage.ask("GET", "/health"))[1].keys()
