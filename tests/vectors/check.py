#!/usr/bin/env python3
# ruff: noqa
# fmt: off
"""Drive a session server through recorded conversations and compare what it does.

usage: check.py VECTORS.jsonl.gz --start 'COMMAND with {port} and {engine}' [--limit N] [--only NAME] [--json]
       check.py VECTORS.jsonl.gz --server URL --engine-port PORT

The checker is the engine: it answers POST /generate as the vector says and
notes the input_ids that it is given. Standard library only. Exit code 0 when
every vector holds. README.md beside this file says what a vector is.
"""
import argparse, gzip, json, os, shlex, signal, socket, struct, subprocess, sys, threading, time, urllib.error, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Engine:
    """Scripted `/generate`: answers are queued in the order in which requests will arrive."""

    def __init__(self, port=0):
        self.queue, self.seen, self.cond = [], [], threading.Condition()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *a):
                pass

            def send(self, status, payload, kind="application/json"):
                data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                if self.path.startswith(("/model_info", "/get_model_info")):
                    self.send(200, {"model_path": "scripted", "tokenizer_path": "scripted", "is_generation": True})
                elif self.path.startswith("/v1/loads"):
                    self.send(200, {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})
                else:
                    self.send(200, {"status": "ok"})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                if self.path.rstrip("/") != "/generate":
                    return self.send(200, {"status": "ok"})
                with engine.cond:
                    answer = engine.queue.pop(0) if engine.queue else {"error": 500, "unscripted": True}
                    engine.seen.append(body)
                    engine.cond.notify_all()
                gate = answer.get("gate")
                if gate is not None:
                    gate.wait(60)
                if "error" in answer:
                    return self.send(answer["error"], {"object": "error", "message": "scripted refusal", "type": "BadRequest", "code": answer["error"]})
                ids, n = answer["ids"], len(answer["ids"])
                finish = {"type": "length", "length": n} if answer["finish"] == "length" else {"type": "stop", "matched": ids[-1]}
                out = {"text": "", "output_ids": ids, "meta_info": {"id": body.get("rid") or answer["id"], "finish_reason": finish, "prompt_tokens": len(body.get("input_ids") or []), "completion_tokens": n,
                    "cached_tokens": answer["cached_tokens"], "weight_version": answer["weight_version"], "output_token_logprobs": [[lp, i, None] for lp, i in zip(answer["logprobs"], ids)], "e2e_latency": 0.001}}
                if body.get("stream"):
                    self.send(200, b"data: " + json.dumps(out).encode() + b"\n\ndata: [DONE]\n\n", "text/event-stream")
                else:
                    self.send(200, out)

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def wait_seen(self, n, alive, timeout=30):
        with self.cond:
            end = time.monotonic() + timeout
            while len(self.seen) < n and alive() and time.monotonic() < end:
                self.cond.wait(0.02)
            return len(self.seen) >= n


class Failed(Exception):
    pass


def call(method, url, body=None, timeout=60, accept="application/json"):
    data = None if body is None else json.dumps(body).encode()
    req = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json", "Accept": accept})
    try:
        with urllib.request.urlopen(req, timeout=timeout) as r:
            return r.status, json.loads(r.read() or b"null")
    except urllib.error.HTTPError as e:
        raw = e.read()
        try:
            return e.code, json.loads(raw)
        except ValueError:
            return e.code, {"raw": raw[:300].decode(errors="replace")}


def respell(message, seed):
    """The assistant message as another client library sends it back: null for "", no empty tool_calls, no index."""
    m = json.loads(json.dumps(message))
    if m.get("content") == "" and seed % 2:
        m["content"] = None
    if not m.get("tool_calls"):
        if seed % 3 == 0:
            m.pop("tool_calls", None)
        elif seed % 3 == 1:
            m["tool_calls"] = []
    for i, c in enumerate(m.get("tool_calls") or []):
        if (seed >> i) % 2:
            c.pop("index", None)
    return m


def reorder(message):
    """Same tool arguments, keys in the other order and without spaces."""
    m = json.loads(json.dumps(message))
    for c in m.get("tool_calls") or []:
        a = json.loads(c["function"]["arguments"])
        c["function"]["arguments"] = json.dumps(dict(reversed(list(a.items()))), separators=(",", ":"))
    return m


def bits(values):
    """Floats as their IEEE-754 bits, so that -0.0 is not 0.0; shown as hex."""
    return [struct.pack(">d", float(v)).hex() + f" ({float(v)!r})" for v in values]


def first_difference(path, want, got):
    if len(want) != len(got):
        return f"{path}: {len(want)} wanted, {len(got)} got"
    for i, (w, g) in enumerate(zip(want, got)):
        if w != g:
            return f"{path}[{i}]: {w} wanted, {g} got"
    return None


class Run:
    def __init__(self, base, engine, vector):
        self.base, self.engine, self.v, self.replies = base, engine, vector, {}
        status, body = call("POST", f"{base}/sessions", {"version": vector["version"], "matcher": vector["matcher"]})
        if status not in (200, 201) or "session_id" not in (body or {}):
            raise Failed(f"POST /sessions answered {status} {body}")
        self.session = f"{base}/sessions/{body['session_id']}"

    def messages(self, refs):
        out = []
        for m in refs:
            if "$reply" not in m:
                if "tool_call_id" in m:
                    reply, call_no = m["tool_call_id"]["$call"]
                    m = {**m, "tool_call_id": self.replies[reply]["tool_calls"][call_no]["id"]}
                out.append(m)
                continue
            reply = self.replies[m["$reply"]]
            spelling = m.get("spelling")
            out.append(reorder(reply) if spelling == "reordered" else respell(reply, m["seed"]) if spelling == "client" else reply)
        return out

    def body(self, refs):
        b = {"model": "m", "messages": self.messages(refs), "chat_template_kwargs": {"enable_thinking": self.v["thinking"]}}
        if self.v["tools"]:
            b["tools"] = self.v["tools"]
        return b

    def chat_url(self):
        return f"{self.session}/v1/chat/completions"

    def check_chat(self, where, expect, status, body, seen, key):
        if status != expect["status"]:
            raise Failed(f"{where}: status {expect['status']} wanted, {status} got: {json.dumps(body)[:300]}")
        if expect["engine_called"] != (seen is not None):
            raise Failed(f"{where}: engine {'not ' if seen is None else ''}called, the other was wanted")
        if seen is not None:
            d = first_difference(f"{where}.prompt_ids", expect["prompt_ids"], seen.get("input_ids") or [])
            if d:
                raise Failed(d)
        if status == 200:
            self.replies[key] = body["choices"][0]["message"]

    def step(self, i, s):
        where = f"step {i} {s['op']}"
        if s["op"] == "chat":
            n = len(self.engine.seen)
            self.engine.queue[:] = [s["engine"]]
            status, body = call("POST", self.chat_url(), self.body(s["messages"]))
            seen = self.engine.seen[n] if len(self.engine.seen) > n else None
            self.check_chat(where, s["expect"], status, body, seen, s.get("reply"))
        elif s["op"] == "overlap":
            runs = []
            for r in s["requests"]:
                gate, n = threading.Event(), len(self.engine.seen)
                self.engine.queue[:] = [{**r["engine"], "gate": gate}]
                result = {}
                t = threading.Thread(target=lambda result=result, b=self.body(r["messages"]): result.update(zip(("status", "body"), call("POST", self.chat_url(), b))), daemon=True)
                t.start()
                called = self.engine.wait_seen(n + 1, t.is_alive)
                runs.append((gate, t, result, self.engine.seen[n] if called else None))
            for i2 in s["finish_order"]:
                runs[i2][0].set()
                runs[i2][1].join(60)
            for k, (r, (_, _, result, seen)) in enumerate(zip(s["requests"], runs)):
                self.check_chat(f"{where} request {k}", r["expect"], result.get("status"), result.get("body"), seen, r["reply"])
        elif s["op"] == "get":
            status, body = call("GET", self.session)
            if status != 200:
                raise Failed(f"{where}: status {status}")
            e, tree = s["expect"], body["metadata"].get("tree") or {}
            got = {"records": len(body["records"]), "tokens": len(body["metadata"].get("accumulated_token_ids") or [])}
            if "nodes" in e:
                got |= {"nodes": [[x["id"], x["parent"]] for x in tree.get("nodes", [])], "leaves": [x["path_node_ids"] for x in tree.get("leaves", [])]}
            if got != e:
                raise Failed(f"{where}: {e} wanted, {got} got")
        elif s["op"] == "samples":
            body_in = {"max_seq_len": s["max_seq_len"], "metadata": s["metadata"]}
            status, body = call("POST", f"{self.session}/samples", {k: v for k, v in body_in.items() if v is not None})
            e = s["expect"]
            if status != e["status"]:
                raise Failed(f"{where}: status {e['status']} wanted, {status} got: {json.dumps(body)[:300]}")
            if status != 200:
                return
            if body.get("empty_reason") != e["empty_reason"]:
                raise Failed(f"{where}.empty_reason: {e['empty_reason']} wanted, {body.get('empty_reason')} got")
            if len(body["samples"]) != len(e["samples"]):
                raise Failed(f"{where}: {len(e['samples'])} samples wanted, {len(body['samples'])} got")
            for k, (w, g) in enumerate(zip(e["samples"], body["samples"])):
                p = f"{where}.samples[{k}]"
                d = first_difference(f"{p}.tokens", w["tokens"], g["tokens"]) or first_difference(f"{p}.loss_mask", w["loss_mask"], g["loss_mask"]) or first_difference(f"{p}.rollout_log_probs", bits(w["rollout_log_probs"]), bits(g["rollout_log_probs"]))
                if d:
                    raise Failed(d)
                pairs = [("response_length", w["response_length"], g["response_length"]), ("response", w["response"], g["response"]), ("status", w["status"], g["status"]), ("weight_versions", w["weight_versions"], g["weight_versions"]),
                    ("cached_tokens", w["prefix_cache"]["cached_tokens"], g["cached_tokens"]), ("prompt_tokens", w["prefix_cache"]["total_prompt_tokens"], g["prompt_tokens"])]
                if self.v["version"] == "v2":
                    pairs += [("leaf_path", w["leaf_path"], g["leaf_path"]), ("reward", w["reward"], g["reward"])]
                for name, a, b in pairs:
                    if a != b:
                        raise Failed(f"{p}.{name}: {a!r} wanted, {b!r} got")

    def all(self):
        for i, s in enumerate(self.v["steps"]):
            self.step(i, s)
        call("DELETE", self.session)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("vectors")
    ap.add_argument("--start", help="command that starts the server; {port} and {engine} are filled in")
    ap.add_argument("--server", help="URL of a running server whose engine is this checker")
    ap.add_argument("--engine-port", type=int, default=0)
    ap.add_argument("--limit", type=int)
    ap.add_argument("--only")
    ap.add_argument("--show", type=int, default=10, help="failures to print")
    ap.add_argument("--json", action="store_true")
    a = ap.parse_args()
    engine, proc = Engine(a.engine_port), None
    base = a.server
    if a.start:
        port = free_port()
        base = f"http://127.0.0.1:{port}"
        proc = subprocess.Popen(shlex.split(a.start.format(port=port, engine=f"http://127.0.0.1:{engine.port}")), start_new_session=True)
        end = time.monotonic() + 120
        while True:
            try:
                if call("GET", f"{base}/health", timeout=2)[0] == 200:
                    break
            except OSError:
                pass
            if proc.poll() is not None or time.monotonic() > end:
                sys.exit("the server did not come up")
            time.sleep(0.2)
    passed, failed = 0, []
    try:
        with gzip.open(a.vectors, "rt", encoding="utf-8") as f:
            for line in f:
                v = json.loads(line)
                if a.only and v["name"] != a.only:
                    continue
                if a.limit is not None and passed + len(failed) >= a.limit:
                    break
                try:
                    Run(base, engine, v).all()
                    passed += 1
                except Failed as e:
                    failed.append((v["name"], v["version"], str(e)))
                except Exception as e:  # a broken answer fails its vector, not the run
                    failed.append((v["name"], v["version"], f"{type(e).__name__}: {e}"))
    finally:
        if proc is not None:
            os.killpg(proc.pid, signal.SIGTERM)
            try:
                proc.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(proc.pid, signal.SIGKILL)
    if a.json:
        print(json.dumps({"passed": passed, "failed": [{"name": n, "version": v, "why": w} for n, v, w in failed]}))
    else:
        for n, v, w in failed[: a.show]:
            print(f"{n} ({v}): {w[:500]}")
        print(f"{passed} passed, {len(failed)} failed")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
