"""`rollout session serve` serves until it is stopped, and says on which port."""

import json
import signal
from urllib.request import urlopen

from command import Rollout

from rollout.engine.tiny import CHECKPOINT


def test_the_session_server_says_its_port_answers_and_ends(rollout: Rollout):
    run = rollout.start("session", "serve", "--engine", "http://127.0.0.1:9", "--tokenizer", CHECKPOINT)
    assert run.process.stdout is not None
    ready = json.loads(run.process.stdout.readline())
    with urlopen(f"http://127.0.0.1:{ready['port']}/health", timeout=10) as reply:
        assert 200 == reply.status
    assert 0 == run.end(signal.SIGTERM)
    assert [] == run.left_over()
