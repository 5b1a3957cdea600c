"""mini-swe-agent as a program of the agent `command`: one prompt row in, its repository mended (or not), a result out.

    rollout run --prompts examples/mini_swe_agent/prompts.jsonl --agent command --reward none \\
        --agent-command "python $PWD/examples/mini_swe_agent/solve.py" --max-new-tokens 512 --rollout-timeout-s 600

`pip install mini-swe-agent` brings it; it need not be the environment of `rollout`. It asks litellm for the
model `openai/policy`, and litellm takes OPENAI_BASE_URL and OPENAI_API_KEY, which name the rollout's session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Before its import: no network for price lists, no files in the home folder, no repeats behind our back.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": str(Path.cwd() / ".mini"),
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "MSWEA_SILENT_STARTUP": "1",
}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You mend code with the bash tool."
TASK = "{{task}}\nWhen it is done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def main() -> int:
    row = json.load(sys.stdin)
    repository = Path("repository").absolute()
    for name, text in row["metadata"]["repository"].items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    model = LitellmModel(
        model_name="openai/policy", model_kwargs={"extra_body": row["request_kwargs"], "max_retries": 0}
    )
    environment = LocalEnvironment(cwd=str(repository), timeout=30)
    agent = DefaultAgent(model, environment, system_template=SYSTEM, instance_template=TASK, step_limit=20)
    ended = agent.run(row["messages"][-1]["content"]).get("exit_status", "")
    if ended != "Submitted":
        print(f"mini-swe-agent ended with {ended} after {agent.n_calls} calls", file=sys.stderr)
        return 1
    passed = subprocess.run(row["metadata"]["check"], shell=True, cwd=repository).returncode == 0
    result = {"reward": float(passed), "metadata": {"ended": ended, "calls": agent.n_calls}}
    Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
