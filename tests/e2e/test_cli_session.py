"""`rollout session serve` serves until it is stopped, and says where."""

import json
import signal
from urllib.request import urlopen

from command import Rollout

from rollout.engine.tiny import CHECKPOINT


def test_the_session_server_says_where_it_is_answers_and_ends(rollout: Rollout):
    for as_json in (True, False):
        options = ("--engine", "http://127.0.0.1:9", "--tokenizer", CHECKPOINT, *(["--json"] if as_json else []))
        run = rollout.start("session", "serve", *options)
        assert run.process.stdout is not None
        line = run.process.stdout.readline()
        url = json.loads(line)["url"] if as_json else line.removeprefix("sessions are served at ").strip()
        with urlopen(f"{url}/health", timeout=10) as reply:
            assert 200 == reply.status
        assert 0 == run.end(signal.SIGTERM)
        assert [] == run.left_over()
