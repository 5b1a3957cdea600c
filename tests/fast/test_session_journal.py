"""The journal: what it gives back at any cut, what it refuses, and that a session comes back as it was."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Conversation, play, tiny_tito, user
from session_dump import dump
from strategies import conversations

from rollout.errors import BadConfig, CannotRestore, SessionRefused
from rollout.session.events import EventLog
from rollout.session.journal import Journal, Opened, remove_journal, remove_left
from rollout.session.keeping import Keeping
from rollout.session.live import LiveSession, LiveSessions
from rollout.session.metrics import Metrics
from rollout.session.replaying import restore_session
from rollout.session.restoring import Restoring

TITO = tiny_tito()


class Kept:
    """Sessions over a journal, as a server has them."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.metrics = Journal(folder), Metrics()
        self.sessions = LiveSessions(None, max_sessions=9, idle_s=60)
        self.keeping = Keeping(self.journal, self.sessions, self.metrics)

    def talk(self, version: str, **given: Any) -> tuple[Conversation, LiveSession]:
        talk = Conversation(TITO, version, **given)
        return talk, self.keeping.add(talk.session, Opened(key="sk-secret", opened_at=talk.now))

    def restore(self) -> None:
        """Restore all that was left."""
        events = EventLog("json", os.open(os.devnull, os.O_WRONLY))
        asyncio.run(restore_all(Restoring(self.keeping, self.sessions, TITO, metrics=self.metrics, events=events)))


async def restore_all(restoring: Restoring) -> None:
    restoring.find()
    await restoring.restore()


def restored(folder: Path) -> list[LiveSession]:
    kept = Kept(folder)
    kept.restore()
    kept.journal.close()
    return kept.sessions.all()


def seen(live: LiveSession) -> bytes:
    """All of a session, and the refusals on its tape."""
    return dump(live.session) + repr(sorted(live.refused.items())).encode()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(("v1", "v2")), conversations, st.randoms(use_true_random=False))
def test_at_any_cut_a_session_is_that_of_the_whole_records(
    tmp_path_factory: pytest.TempPathFactory, version: str, steps: list[Any], rng: Any
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    kept = Kept(folder)
    talk, live = kept.talk(version, seed="07", max_seq_len=900)
    file = next(folder.glob("*.journal"))
    moments = [(file.stat().st_size, seen(live))]
    for step in steps:
        play(talk, [step])
        if rng.random() < 0.3:
            kept.keeping.count_refusal(live, "400")
        moments.append((file.stat().st_size, seen(live)))
    kept.journal.close()
    content = file.read_bytes()
    (whole,) = restored(folder)
    assert (seen(live), "sk-secret") == (seen(whole), whole.opened.key)
    size, before = rng.choice(moments)
    file.write_bytes(content[:size] + bytes(rng.randrange(256) for _ in range(rng.randrange(60))))
    (cut,) = restored(folder)
    assert before == seen(cut)
    assert size == file.stat().st_size


def test_a_restored_session_goes_on_with_the_same_prompts_and_seeds(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    talk, live = kept.talk("v2", seed="07")
    talk.ask(user("a"))
    kept.journal.close()
    (again,) = restored(tmp_path)
    body = {"model": "m", "messages": [*talk.history, user("b")]}
    one, two = (session.begin(body, requested_at=talk.now) for session in (live.session, again.session))
    assert (one.prompt_ids, one.sampling_seed) == (two.prompt_ids, two.sampling_seed)


def test_seeds_of_turns_that_ran_beside_each_other_come_back(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    talk, live = kept.talk("v2", seed="07")
    first, second = talk.begin([user("a")]), talk.begin([user("a")])
    talk.commit(second, "x")
    talk.commit(first, "y")
    kept.journal.close()
    (again,) = restored(tmp_path)
    assert seen(live) == seen(again)


def test_what_the_disk_does_not_take_leaves_the_session_and_the_file_as_they_were(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    talk, live = kept.talk("v2")
    talk.ask(user("a"))
    file = next(tmp_path.glob("*.journal"))
    before, content = seen(live), file.read_bytes()
    turn = talk.begin([*talk.history, user("b")])
    away = tmp_path / "away"
    file.rename(away)
    with pytest.raises(SessionRefused) as refused:
        talk.commit(turn, "x")
    talk.session.release(turn)
    assert (500, "journal_failed") == (refused.value.status, refused.value.code)
    assert before == seen(live)
    away.rename(file)
    assert content == file.read_bytes()
    assert "rollout_session_journal_failures_total 1" in kept.metrics.text({})
    talk.ask(user("b"))
    kept.journal.close()
    assert [seen(live)] == [seen(one) for one in restored(tmp_path)]


def test_a_turn_that_is_half_written_when_the_disk_is_full_is_cut_off_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    talk, live = kept.talk("v1")
    talk.ask(user("a"))
    file = next(tmp_path.glob("*.journal"))
    before, content = seen(live), file.read_bytes()
    turn = talk.begin([*talk.history, user("b")])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 100, limits[1]))
    try:
        with pytest.raises(SessionRefused, match="could not be kept"):
            talk.commit(turn, "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    talk.session.release(turn)
    assert (before, content) == (seen(live), file.read_bytes())
    kept.journal.close()


def test_files_are_private_and_go_with_their_session(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "journal"
    kept = Kept(folder)
    _, live = kept.talk("v2")
    file = next(folder.glob("*.journal"))
    assert (0o600, 0o700) == tuple(stat.S_IMODE(path.stat().st_mode) for path in (file, folder))
    with pytest.raises(BadConfig, match="another session server"):
        Journal(folder)
    kept.sessions.remove(live)
    assert not file.exists()
    kept.keeping.count_refusal(live, "404")
    remove_left(folder.parent, "journal")
    assert folder.exists(), "a living server has it"
    kept.journal.close()
    remove_journal(folder)
    assert not folder.exists()


def test_what_breaks_off_before_the_session_was_told_is_removed(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.talk("v2")
    kept.journal.close()
    file = next(tmp_path.glob("*.journal"))
    file.write_bytes(file.read_bytes()[:-1])
    assert [] == restored(tmp_path)
    assert not file.exists()


def test_a_file_of_another_release_is_told_and_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    talk, _ = kept.talk("v2")
    talk.ask(user("a"))
    kept.journal.close()
    file = next(tmp_path.glob("*.journal"))
    content = file.read_bytes()
    monkeypatch.setattr("rollout.session.journal.FORMAT", 2)
    later = Kept(tmp_path)
    later.restore()
    later.journal.close()
    assert not later.sessions.all()
    assert content == file.read_bytes()
    assert "rollout_session_sessions_not_restored_total 1" in later.metrics.text({})


def test_a_session_that_does_not_come_out_again_is_told_and_keeps_its_file(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    talk, live = kept.talk("v2")
    talk.ask(user("a"))
    tape = live.session.tape()
    tape.exchanges[0].appended_ids_P = tape.exchanges[0].appended_ids_P + 1
    with pytest.raises(CannotRestore, match="another prompt"):
        deque(restore_session(tape, TITO, context_length=None))
    with pytest.raises(CannotRestore, match="refused"):
        deque(restore_session(live.session.tape(), TITO, context_length=3))
    tape.settings = type(tape.settings)(renderer="glm-5")
    with pytest.raises(CannotRestore, match="renders qwen3"):
        deque(restore_session(tape, TITO, context_length=None))


def test_a_folder_that_cannot_be_had_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadConfig, match="journal"):
        Journal(tmp_path / "file")
