"""A server that injects faults, in place of SGLang: `python faulty_server.py --port N --fault NAME --home DIR`.

crash     ends at once, having said why
hang      answers /health, /model_info and /v1/loads, and never a generation, from the time DIR/hang exists
queue     a queue of a thousand that never gets shorter, /health_generate waits in it; counters move
stubborn  ignores SIGTERM
forks     leaves a grandchild in a process session of its own, where no group signal finds it
part      has a child called sglang::scheduler that can be killed alone
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEP = "import time; time.sleep(600)"


def handler(fault: str, home: Path) -> type[BaseHTTPRequestHandler]:
    counter = iter(range(10**9))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            stuck = fault == "queue" or (fault == "hang" and (home / "hang").exists())
            if path in ("/generate", "/health_generate") and stuck:
                threading.Event().wait(600)
            running = 1 if stuck else 0
            waiting = 1000 if fault == "queue" else 0
            moved = next(counter) if fault == "queue" else 0
            load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": moved}
            body = json.dumps({"loads": [load], "version": "faulty", "model_path": "faulty"}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--fault")
    parser.add_argument("--home", type=Path)
    options, _ = parser.parse_known_args()
    if options.fault == "crash":
        sys.exit("the faulty server cannot start, as it was told")
    if options.fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fault == "forks":
        subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    if options.fault == "part":
        subprocess.Popen(["sglang::scheduler", "-c", SLEEP], executable=sys.executable)
    with (options.home / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {time.time()}\n")
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(options.fault, options.home))
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
