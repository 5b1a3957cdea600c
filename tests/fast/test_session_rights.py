"""Every route of the session server, and who may use it: a route that is not in the table fails here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from faulty_engine import FaultyEngine
from loopback import served
from scripted import tiny_tito

from rollout.engine.client import EngineClient
from rollout.engine.tiny import CHECKPOINT
from rollout.session.app import SessionServer
from rollout.session.options import ServerOptions

TOKEN = "driver-secret"
ONE = "/sessions/{session_id}"
RIGHTS = {
    ("GET", "/health"): "anyone",
    ("GET", "/metrics"): "driver",
    ("GET", "/sessions"): "driver",
    ("POST", "/sessions"): "driver",
    ("GET", ONE): "driver",
    ("DELETE", ONE): "driver",
    ("GET", f"{ONE}/tape"): "driver",
    ("POST", f"{ONE}/samples"): "driver",
    ("POST", f"{ONE}/v1/chat/completions"): "client",
    ("POST", f"{ONE}/v1/messages"): "client",
    ("POST", f"{ONE}/v1/messages/count_tokens"): "client",
    ("GET", f"{ONE}/v1/models"): "client",
    ("*", f"{ONE}/v1/responses"): "anyone",
}
"""`anyone` gets nothing of a session: /health, and the text that a route is not served."""
TITO = tiny_tito()


def server(engine: str = "http://127.0.0.1:9") -> SessionServer:
    options = ServerOptions(engine=engine, tokenizer=Path(CHECKPOINT), driver_token=TOKEN)
    return SessionServer(EngineClient(engine), TITO, options)


def test_every_route_is_in_the_table() -> None:
    resources = server().app().router.routes()
    found = {(route.method, route.resource.canonical) for route in resources if route.resource is not None}
    # aiohttp answers HEAD wherever there is a GET, by the same handler.
    assert RIGHTS.keys() == {(method, path) for method, path in found if method != "HEAD"}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with served(FaultyEngine([1]).app()) as engine, served(server(engine).app()) as url:
        yield url


@pytest.mark.parametrize(
    ("route", "right"), RIGHTS.items(), ids=lambda value: "-".join(value) if len(value) == 2 else value
)
async def test_a_route_lets_in_who_has_its_right_and_nobody_else(url: str, route: tuple[str, str], right: str) -> None:
    async with aiohttp.ClientSession() as http:
        opened = []
        for _ in range(2):
            async with http.post(f"{url}/sessions", headers={"x-api-key": TOKEN}) as reply:
                opened.append(await reply.json())
        (mine, other), method = opened, route[0].replace("*", "POST")
        path = route[1].replace("{session_id}", mine["session_id"])
        senders = {None: "anyone", "wrong": "anyone", other["session_key"]: "anyone", mine["session_key"]: "client"}
        for sent, has in {**senders, TOKEN: "driver"}.items():
            headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
            async with http.request(method, url + path, headers=headers, data=b"{}") as reply:
                let_in = right == "anyone" or has == "driver" or has == right
                assert let_in == (reply.status != 401), (sent, reply.status)
