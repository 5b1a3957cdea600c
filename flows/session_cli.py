"""`rollout session`: the session server by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

session = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The session server by itself.")


@session.callback()
def _root() -> None:
    """Keeps `serve` a command of its own, though it is the only one."""


@session.command()
def serve(
    engine: Annotated[list[str], typer.Option(help="URL of an engine (SGLang's /generate); once for each.")],
    tokenizer: Annotated[Path, typer.Option(help="Checkpoint directory with tokenizer.json.")],
    host: Annotated[str, typer.Option(help="Address to bind; not loopback: --driver-token-env too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port, or the first of several; 0: free ones.")] = 0,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Server processes, on as many ports from --port.")] = 1,
    renderer: Annotated[str, typer.Option(help="Chat format, by its name in `renderers`.")] = "qwen3",
    enable_thinking: Annotated[bool, typer.Option(help="Sessions think unless they say otherwise.")] = False,
    shadow_matcher: Annotated[str | None, typer.Option(help="A matcher to ask beside each session's own.")] = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions at once in each process, at most.")] = 10_000,
    keepalive_s: Annotated[float, typer.Option(help="Seconds between comments in a waiting stream.")] = 10.0,
    idle_s: Annotated[float, typer.Option(help="Seconds until a session that nobody uses expires.")] = 3600.0,
    journal: Annotated[Path | None, typer.Option(help="Folder to keep every turn in, to go on after a crash.")] = None,
    log_format: Annotated[str, typer.Option(help="auto (text on a terminal, else json), json or text.")] = "auto",
    driver_token_env: Annotated[str | None, typer.Option(help="Environment variable with the driver's token.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The ready line as JSON: port, url and urls.")] = False,
) -> None:
    """Serve sessions over HTTP until SIGTERM or ^C; prints one line with its URLs when it answers.

    A session lives in one process; its id says in which, and every port of the range answers for it.
    POST /sessions opens it in the next process, whichever is asked, and its answer's base_url is the
    short way there. GET /sessions lists those of all processes; /metrics and /health are each port's own.
    A process that dies is started again on its port, at most 5 times a minute.

    Of several engines, which must serve the same, each session has its own; one that is gone loses its
    sessions to the others until it is back.

    Without --driver-token-env nobody is asked for a token, and only loopback is served.

    \b
    Examples:
      rollout session serve --engine http://127.0.0.1:30000 --tokenizer ./Qwen3-8B --port 8100
      rollout session serve --engine http://127.0.0.1:30000 --tokenizer ./Qwen3-8B --port 8100 --processes 4
      rollout session serve --engine http://127.0.0.1:30000 --engine http://127.0.0.1:30001 --tokenizer ./Qwen3-8B
      TOKEN=... rollout session serve --engine http://10.0.0.2:30000 --tokenizer ./Qwen3-8B \\
          --host 0.0.0.0 --port 8100 --driver-token-env TOKEN
      curl -X POST http://127.0.0.1:8100/sessions -d '{"version": "v2"}'
    """
    from rollout.session.options import ServerOptions, read_token
    from rollout.session.server import serve as serve_sessions

    options = ServerOptions(
        engine=",".join(engine),
        tokenizer=tokenizer,
        host=host,
        port=port,
        renderer=renderer,
        enable_thinking=enable_thinking,
        shadow_matcher=shadow_matcher,
        max_sessions=max_sessions,
        keepalive_s=keepalive_s,
        idle_s=idle_s,
        journal=journal,
        log_format=cast(Any, log_format),
        driver_token=read_token(driver_token_env),
    )
    if processes == 1:
        serve_sessions(options, announce=lambda bound: _announce(as_json, bound, [_url(host, bound)]))
        return
    from rollout.session.events import EventLog
    from rollout.session.fleet import serve_fleet

    EventLog(options.log_format).take_logging()
    serve_fleet(options, processes, announce=lambda first, urls: _announce(as_json, first, urls))


def _announce(as_json: bool, port: int, urls: list[str]) -> None:
    """The ready line: any of the URLs will do, the first is as good as another."""
    text = f"sessions are served at {', '.join(urls)}"
    typer.echo(json.dumps({"ready": True, "port": port, "url": urls[0], "urls": urls}) if as_json else text)


def _url(host: str, port: int) -> str:
    from rollout.session.routing import Place

    return Place(slot=0, size=1, host=host, first_port=port).url(0)
