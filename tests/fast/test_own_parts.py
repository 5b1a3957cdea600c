"""Pickers, finishers and matchers of a user's own package, dotted paths, and the listing of all parts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from installing import install
from scripted import Conversation, tiny_tito, user

from rollout.errors import SessionRefused, UnknownPart
from rollout.parts import AGENTS, load_part
from rollout.session.finishing import find_finisher
from rollout.session.matching import find_matcher
from rollout.session.picking import find_picker

COMMAND = Path(sys.executable).with_name("rollout")
TITO = tiny_tito()
CODE = """
import numpy as np

def first(leaves):
    return list(leaves)[:1]

def anything(stored, replayed):
    return stored.get("role") == replayed.get("role")

def last_turn_only(leaves):
    for leaf in leaves:
        leaf.sample.loss_mask_R[: -len(leaf.leaf.generation.output_ids_O)] = 0

def trains_all(leaves):
    for leaf in leaves:
        leaf.sample.loss_mask_R[:] = 1

def renames(leaves):
    for leaf in leaves:
        leaf.sample.tokens_T = leaf.sample.tokens_T + np.int32(1)

def rewords(leaves):
    for leaf in leaves:
        leaf.sample.metadata["leaf"]["node_id"] = 7

def picks_lazily(leaves):
    return (leaf for leaf in leaves)

def picks_and_unmasks(leaves):
    for leaf in leaves:
        leaf.sample.loss_mask_R[:] = 0
    return leaves

def no_leaves():
    pass
"""
ENTRIES = {
    "rollout.pickers": {
        "own_first": "first",
        "own_none": "no_leaves",
        "own_lazy": "picks_lazily",
        "own_unmasks": "picks_and_unmasks",
    },
    "rollout.matchers": {"own_anything": "anything"},
    "rollout.finishers": {
        "own_last": "last_turn_only",
        "own_all": "trains_all",
        "own_renames": "renames",
        "own_rewords": "rewords",
    },
}


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = install(tmp_path_factory.mktemp("site"), "own-session-parts", CODE, ENTRIES)
        patch.syspath_prepend(folder)
        yield folder


def two_turns(**settings):
    talk = Conversation(TITO, "v2", **settings)
    talk.ask(user("one"), text="first")
    talk.ask(user("two"), text="second")
    return talk


def test_own_session_parts_are_used_and_recorded():
    talk = two_turns(matcher="own_anything", picker="own_first", finisher="own_last")
    talk.history[1] = {"role": "assistant", "content": "rewritten"}
    talk.ask(user("three"), text="third")
    (sample,) = talk.session.samples().samples
    assert ("own_first", "own_last", [0, 1, 2]) == (sample.picker, sample.finisher, sample.leaf_path)
    assert "third" in TITO.decode(sample.tokens_T[-sample.response_length :][sample.loss_mask_R == 1].tolist())
    assert "first" not in TITO.decode(sample.tokens_T[-sample.response_length :][sample.loss_mask_R == 1].tolist())


@pytest.mark.parametrize(
    ("finisher", "problem"),
    [
        ("own_all", "must only clear entries"),
        ("own_renames", "must change the samples' masks and nothing else"),
        ("own_rewords", "must change the samples' masks and nothing else"),
    ],
)
def test_a_finisher_that_trains_what_was_not_sampled_or_changes_it_is_refused(finisher, problem):
    with pytest.raises(SessionRefused, match=problem) as caught:
        two_turns(finisher=finisher).session.samples()
    assert 422 == caught.value.status


def test_a_picker_may_give_its_leaves_one_by_one():
    assert 1 == len(two_turns(picker="own_lazy").session.samples().samples)


def test_a_picker_that_changes_a_sample_is_refused():
    with pytest.raises(SessionRefused, match="must change nothing of its input samples") as caught:
        two_turns(picker="own_unmasks").session.samples()
    assert 422 == caught.value.status


def test_a_part_that_takes_other_arguments_is_refused_when_the_session_opens():
    with pytest.raises(UnknownPart, match=r"picker 'own_none' cannot be called: .* must be pick\(leaves\)"):
        find_picker("own_none")


def test_a_dotted_path_is_loaded_only_where_its_module_is_allowed(monkeypatch):
    path = "own_session_parts:first"
    with pytest.raises(UnknownPart, match=r"ROLLOUT_ALLOWED_MODULES does not allow \(allowed: none\)"):
        load_part("rollout.pickers", path)
    monkeypatch.setenv("ROLLOUT_ALLOWED_MODULES", "own_session, os.path")
    for refused in (path, "os:system", "posixpath:join"):
        with pytest.raises(UnknownPart, match=r"does not allow \(allowed: own_session, os\.path\)"):
            load_part(AGENTS, refused)
    monkeypatch.setenv("ROLLOUT_ALLOWED_MODULES", "own_session_parts")
    assert "first" == find_picker(path).__name__
    assert find_matcher("own_session_parts:anything")({"role": "a"}, {"role": "a"})
    assert find_finisher("own_session_parts:last_turn_only")
    with pytest.raises(UnknownPart, match="cannot be loaded from own_session_parts:nothing: AttributeError"):
        find_picker("own_session_parts:nothing")


def test_the_listing_names_every_part_its_package_and_what_is_wrong_with_it(tmp_path, monkeypatch):
    code = "print('loud')\nneeds = 'v2'\ndef run(a, b, c, d, **kwargs): ...\ndef lame(a): ...\n"
    entries = {"rollout.agents": {"own_fine": "run", "own_lame": "lame"}, "rollout.rewards": {"own_gone": "gone"}}
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path, "own-listed", code, entries)))
    done = subprocess.run([COMMAND, "agents", "--json"], capture_output=True, text=True, check=True)
    parts = {part["name"]: part for part in json.loads(done.stdout)["parts"]}
    assert {
        "kind": "agent",
        "name": "own_fine",
        "package": "own-listed 1.0",
        "target": "own_listed:run",
        "needs": "v2",
        "problem": None,
    } == parts["own_fine"]
    assert "must be run(base_url, prompt" in parts["own_lame"]["problem"]
    assert "has no attribute 'gone'" in parts["own_gone"]["problem"]
    ours = {name: part["kind"] for name, part in parts.items() if part["package"].startswith("rollout-lake ")}
    assert {
        **dict.fromkeys(["single_turn", "tool_loop", "branching", "reference_case", "command"], "agent"),
        "exact_answer": "reward",
        **dict.fromkeys(["drop_retries", "keep_all"], "picker"),
        "train_once": "finisher",
        **dict.fromkeys(["strict", "loose_tool_call", "role_content_only"], "matcher"),
    } == ours
    assert {None} == {parts[name]["problem"] for name in ours}
    shown = subprocess.run([COMMAND, "agents"], capture_output=True, text=True, check=True).stdout
    assert "own-listed 1.0" in shown and "cannot be used: agent 'own_lame' cannot be called" in shown
