"""HTTP answers: JSON bodies, errors in the vendors' shapes, and the Arrow streams of samples and tape."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pyarrow as pa
from aiohttp import web

from rollout.columns import session_table
from rollout.errors import SessionRefused
from rollout.session.collecting import SamplesReply

ARROW_TYPE = "application/vnd.apache.arrow.stream"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
}


def answer(value: Any, status: int = 200) -> web.Response:
    """`value` as compact JSON; doubles keep their bits."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_body(status: int, message: str, code: str | None = None, *, anthropic: bool = False) -> dict[str, Any]:
    """An error in OpenAI's shape, or in Anthropic's, whose SDK reads `type` at the top too."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if not anthropic:
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}
    kind = "api_error" if status >= 500 else kind
    return {"type": "error", "error": {"type": kind, "message": message, **({"code": code} if code else {})}}


def answer_error(
    status: int, message: str, *, code: str | None = None, retry: bool = False, anthropic: bool = False
) -> web.Response:
    """An error that the vendors' SDKs show and, without `retry`, do not repeat."""
    reply = answer(error_body(status, message, code, anthropic=anthropic), status)
    if not retry:
        reply.headers["x-should-retry"] = "false"
    elif status == 429:
        reply.headers["Retry-After"] = "1"
    return reply


def answer_refusal(refusal: SessionRefused, *, anthropic: bool = False) -> web.Response:
    return answer_error(refusal.status, refusal.message, code=refusal.code, retry=refusal.retry, anthropic=anthropic)


def answer_samples_json(reply: SamplesReply) -> web.Response:
    """Samples under the lake's column names; binary columns as base64."""
    rows = session_table(reply.samples).to_pylist()
    for row in rows:
        if row["routed_experts"] is not None:
            row["routed_experts"] = base64.b64encode(row["routed_experts"]).decode()
    return answer({"samples": rows, "empty_reason": reply.empty_reason, "session_metadata": reply.session_metadata})


def answer_samples_arrow(reply: SamplesReply) -> web.Response:
    """Samples as an Arrow stream of SESSION_SCHEMA; what is not per sample stands in the schema's metadata."""
    facts = {
        b"session_metadata": orjson.dumps(reply.session_metadata),
        b"messages": orjson.dumps(reply.messages),
        b"exchanges": str(reply.exchanges).encode(),
    }
    if reply.empty_reason is not None:
        facts[b"empty_reason"] = reply.empty_reason.encode()
    return answer_arrow(session_table(reply.samples).replace_schema_metadata(facts))


def answer_arrow(table: pa.Table) -> web.Response:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return web.Response(body=sink.getvalue().to_pybytes(), content_type=ARROW_TYPE)
