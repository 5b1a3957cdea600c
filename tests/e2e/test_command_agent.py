"""Programs as agents, through the command: a shell script with curl, and mini-swe-agent on a toy repository."""

import json
import sys
from pathlib import Path

import pytest

from rollout.lake import scan_samples
from rollout.lake.reading import scan_parity

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
set -eu
row=$(cat)
ask() {
  curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \\
    -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: application/json' -d @-
}
body() {
  printf %s "$row" | python3 -c '
import json, sys
row = json.load(sys.stdin)
messages = row["messages"] + [json.loads(text) for text in sys.argv[1:]]
print(json.dumps({"model": "policy", "messages": messages, **row["request_kwargs"]}))' "$@"
}
answer=$(body | ask | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"][0]["message"]))')
body "$answer" '{"role": "user", "content": "Are you sure?"}' | ask > reply.json
printf '{"reward": 0.25, "metadata": {"replies": %s}}' "$(grep -c choices reply.json)" > "$ROLLOUT_RESULT"
"""


def run(rollout, prompts, command, *options):
    """One batch of the agent `command`; its rows by index."""
    started = rollout.start(
        *("run", "--prompts", prompts, "--agent", "command", "--agent-command", command, "--reward", "none"),
        *("--batch-id", "programs", "--n-samples-per-prompt", 2, "--json", *options),
    )
    done = started.wait()
    assert 0 == done.returncode, done.stderr
    assert [] == started.left_over()
    lake = json.loads(done.stdout)["lake"]
    assert {"differs"}.isdisjoint(scan_parity(lake, batch="programs").collect()["verdict"].to_list())
    return scan_samples(lake, batch="programs").sort("index", "sibling").collect().to_dicts()


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_shell_script_with_curl_is_an_agent(rollout, tmp_path):
    (tmp_path / "agent.sh").write_text(SCRIPT)
    rows = [{"messages": [{"role": "user", "content": f"What is {k} + 3?"}], "label": str(k + 3)} for k in (1, 2)]
    found = run(rollout, write(tmp_path / "p.jsonl", *rows), f"sh {tmp_path}/agent.sh")
    assert [0, 1, 2, 3] == [row["index"] for row in found]
    assert {(None, 2, 0.25)} == {(row["failure"], row["turns"], row["reward"]) for row in found}
    assert {1} == {json.loads(row["metadata"])["replies"] for row in found}


@pytest.mark.full
def test_a_refused_turn_is_the_sessions_to_explain_not_the_programs(rollout, tmp_path):
    """curl ends with exit code 22 for each HTTP error; the session's record says which it was."""
    (tmp_path / "agent.sh").write_text(SCRIPT)
    rows = [{"messages": [{"role": "user", "content": "What is 1 + 3?"}]}]
    found = run(rollout, write(tmp_path / "p.jsonl", *rows), f"sh {tmp_path}/agent.sh", "--max-turns", 1)
    assert {("max_turns", 1)} == {(row["failure"]["type"], row["turns"]) for row in found}


@pytest.mark.full
def test_mini_swe_agent_on_a_toy_repository(rollout):
    """The tiny model has no idea of bash: mini-swe-agent gives up after three answers without a call it knows.

    It leaves such an answer out of the next request, so each is a conversation of its own: a rollout of
    three samples, under one rollout_id.
    """
    folder = EXAMPLES / "mini_swe_agent"
    found = run(rollout, folder / "prompts.jsonl", f"{sys.executable} {folder}/solve.py", "--rollout-timeout-s", 200)
    assert [(0, k, 3) for k in range(3)] + [(1, k, 3) for k in range(3)] == [
        (row["rollout_id"], row["sibling"], row["siblings"]) for row in found
    ]
    for row in found:
        assert ("agent_exit", 1, None) == (row["failure"]["type"], row["turns"], row["reward"])
        assert "exit code 1: mini-swe-agent ended with RepeatedFormatError after 3 calls" in row["failure"]["message"]
        assert row["response_length"] > 0 and "sums.py" in row["prompt"]
