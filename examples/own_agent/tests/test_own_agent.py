"""The parts are found, the reward gives what it should, and a batch of them is published (some 20 seconds)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from own_agent.reward import score
from rollout.agents.contract import load_agent
from rollout.lake import scan_samples
from rollout.outcome import RolloutInput
from rollout.rewards import Rollout, load_reward

ROLLOUT = Path(sys.executable).with_name("rollout")
PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"


def test_the_parts_are_installed():
    assert load_agent("careful") and load_reward("graded", "right")


@pytest.mark.parametrize(
    ("text", "right"), [("Answer: 7", 1.0), ("It is 7 .", 0.5), ("Answer: 8", 0.0), ("Answer: 70", 0.0), ("", 0.0)]
)
def test_the_reward(text: str, right: float):
    row = RolloutInput(index=0, group_index=0, messages=[{"role": "user", "content": "q"}], label="7")
    messages = [[*row.messages, {"role": "assistant", "content": text}]]
    assert right == score(Rollout(row=row, messages=messages, samples=[]))["right"]


def test_a_batch_is_published(tmp_path: Path):
    options = ["--agent", "careful", "--reward", "graded", "--reward-key", "right", "--n-samples-per-prompt", "2"]
    command = [ROLLOUT, "run", "--prompts", PROMPTS, "--lake", tmp_path / "lake", "--batch-id", "own", *options]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
    assert "published" == json.loads(done.stdout)["status"]
    samples = scan_samples(str(tmp_path / "lake"), batch="own").collect()
    assert {"careful"} == set(samples["agent"])
    assert 8 == samples["rollout_key"].n_unique()
    assert samples["failure"].is_null().all() and samples["reward"].is_between(0.0, 1.0).all()
    assert {"right", "brief"} == set(json.loads(samples["reward_json"][0]))
