"""The `rollout` command. Prefect is imported only by commands that start a flow."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Annotated, Any

import typer

from flows.options import cli_parameters, given_options
from flows.session_cli import session
from rollout import __version__
from rollout.errors import BadInput

# Plain help: the boxed one cuts long option names at 80 columns.
app = typer.Typer(
    name="rollout", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.add_typer(session, name="session")

Lake = Annotated[str, typer.Option(help="Lake: a local path or s3://bucket/prefix.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]

ENVIRONMENT = """\b
Where things are kept:
Prefect's own state (runs, artifacts) and the logs of child processes go to ROLLOUT_HOME,
by default ~/.local/state/rollout-lake; your Prefect profile is left alone. A PREFECT_API_URL
that you have set, in the environment or in your active profile, is used instead of a server of
our own. A --model on s3:// is fetched into ROLLOUT_HOME/models, once for each state of it.
SGLang runs with the python of ROLLOUT_SGLANG_PYTHON, else with .venv-sglang of the checkout
(`make sglang-cpu`); its logs are in ROLLOUT_HOME/engines.
ROLLOUT_DEBUG=1 shows tracebacks.
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(epilog=ENVIRONMENT)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Agentic RL rollouts as a batch job: every sample a parquet row, proven bit for bit, then published.

    \b
    Examples:
      rollout run                                the shipped prompts, into ./lake
      rollout run --prompts my.jsonl --dry-run   what would run, and its config hash
      rollout run --batch-id mine                start, or go on where it stopped
      rollout show mine --sample 3f9c            one conversation, token by token
      rollout parity mine                        verdicts, and paths that differ
      rollout doctor                             is all there that a batch needs?
    """


def run(dry_run: bool, as_json: bool, **options: Any) -> None:
    """Run one batch of rollouts and publish it.

    A batch that was stopped goes on under the same --batch-id: what is staged is not run again, and
    options that are not given are those it was planned with. `none` stands for null.

    \b
    Examples:
      rollout run --prompts my.jsonl --n-samples-per-prompt 8 --temperature 0.7
      rollout run --prompts my.jsonl --session-version v1 --reward none
      rollout run --engine sglang --engine-recipe qwen3_8b_h200 --model ./Qwen3-8B
      rollout run --engine external --engine-url http://127.0.0.1:30000 --model ./Qwen3-8B
      rollout run --engine external --engine-url http://a:30000 --engine-url http://b:30000 --model ./Qwen3-8B
      rollout run --lake s3://bucket/lake --task-runner ray --ray-resources H200=1
    """
    from flows import launch

    launch.run_batch(given_options(options), dry_run=dry_run, as_json=as_json)


def _run_signature() -> inspect.Signature:
    own = {
        "dry_run": Annotated[bool, typer.Option("--dry-run", help="Show plan, counts and config hash; write nothing.")],
        "as_json": AsJson,
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    extra = [inspect.Parameter(name, keyword, default=False, annotation=kind) for name, kind in own.items()]
    return inspect.Signature([*cli_parameters(), *extra])


run.__signature__ = _run_signature()  # type: ignore[attr-defined]
run.__annotations__ = {}  # typer would read them before the signature
app.command(epilog=ENVIRONMENT)(run)


@app.command()
def show(
    batch: Annotated[str | None, typer.Argument(help="Batch id; without one all batches are listed.")] = None,
    lake: Lake = "./lake",
    group: Annotated[int | None, typer.Option(help="List the samples of this group.")] = None,
    sample: Annotated[str | None, typer.Option(help="Print this sample: its sample_id, or how it begins.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows to list, at most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show batches, one batch, one group or one sample; running, staged and quarantined batches too.

    A batch that runs on this machine is shown with every rollout that has finished: those of unstaged
    shards are read from the spools in ROLLOUT_HOME, without disturbing their writer. On another
    machine than the worker's, or with another ROLLOUT_HOME, only staged shards can be seen.

    With --sample the conversation is printed token by token: prompt and environment dim, sampled
    tokens coloured from green (sure) to red (unlikely), those outside the loss underlined.

    \b
    Examples:
      rollout show
      rollout show mine                          how far it is, failures, a line per group
      rollout show mine --group 3
      rollout show mine --sample 3f9c
    """
    from flows import look

    if batch is None:
        look.show_batches(lake, limit=limit, as_json=as_json)
    elif sample is not None:
        look.show_sample(lake, batch, sample, as_json=as_json)
    elif group is not None:
        look.show_group(lake, batch, group, limit=limit, as_json=as_json)
    else:
        look.show_batch(lake, batch, limit=limit, as_json=as_json)


@app.command()
def parity(
    batch: Annotated[str, typer.Argument(help="Batch id.")],
    lake: Lake = "./lake",
    limit: Annotated[int, typer.Option(min=1, help="Differing rollouts to list, at most.")] = 20,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask this engine the recorded turns again, and compare.")
    ] = None,
    rollouts: Annotated[
        int | None, typer.Option(min=1, help="With --against: so many, spread evenly over the batch. [default: all]")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="With --against: turns in flight.")] = 1,
    record: Annotated[
        bool, typer.Option("--record", help="With --against: add verdicts to the lake, a report and plot to Prefect.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a batch's verdicts and every path that differs. Exit code 1 if a rollout differs.

    A batch that is only staged is checked here and now; nothing is written.

    With --against every recorded prompt goes to another engine (another version, attention backend or kind
    of GPU) with its sampling parameters and seed: per rollout the first token and the first log-prob bit
    that move, and how far log-probs are apart in units in the last place. Nothing is written without --record.

    \b
    Examples:
      rollout parity mine
      rollout parity mine --against http://127.0.0.1:30000 --rollouts 64
      rollout parity mine --against http://127.0.0.1:30000 --json | jq .histogram
    """
    if against is not None:
        from flows import against as comparison

        if comparison.show_against(
            lake,
            batch,
            against,
            rollouts=rollouts,
            concurrency=concurrency,
            record=record,
            limit=limit,
            as_json=as_json,
        ):
            raise typer.Exit(1)
        return
    if record or rollouts is not None:
        raise BadInput("--rollouts and --record go with --against")
    from flows import look

    if look.show_parity(lake, batch, limit=limit, as_json=as_json):
        raise typer.Exit(1)


@app.command(epilog=ENVIRONMENT)
def up(
    lake: Annotated[str, typer.Option(help="Lake that the forms begin with: a local path or s3://.")] = "./lake",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Prefect's pages, on 127.0.0.1.")] = 4200,
    as_json: AsJson = False,
) -> None:
    """Start Prefect's server with its pages, a worker of this host, and all deployments; Ctrl-C ends it all.

    Runs, artifacts and schedules are kept in ROLLOUT_HOME from one `rollout up` to the next. Where a
    PREFECT_API_URL is set, the deployments are registered there and only a worker is started.

    \b
    Examples:
      rollout up
      rollout up --lake s3://bucket/lake --port 4300
    """
    from flows.up import run_up

    run_up(lake=lake, port=port, as_json=as_json)


@app.command()
def trigger(
    deployment: Annotated[str, typer.Option(help="Deployment: its name, or flow/name.")],
    param: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A parameter, once for each; JSON or plain text.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the run to its end; exit code 1 unless it completes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run of a deployment, as the button in Prefect's pages does.

    The server is that of PREFECT_API_URL, else of the `rollout up` that runs on this host.

    \b
    Examples:
      rollout trigger --deployment rollout-batch --param n_samples_per_prompt=8 --watch
      rollout trigger --deployment parity-lane
      rollout trigger --deployment cross-engine --param batch=mine --param against=http://10.0.0.7:30000
    """
    from flows.trigger import run_trigger

    if run_trigger(deployment, param or [], watch=watch, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def agents(as_json: AsJson = False) -> None:
    """List the installed agents, rewards, pickers, finishers and matchers, and what keeps one from loading.

    They are entry points of installed packages, yours as well as ours: see examples/own_agent.
    """
    from flows import look

    look.show_installed(as_json=as_json)


@app.command(epilog=ENVIRONMENT)
def doctor(
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine to look at (SGLang's /generate), once for each; without one the embedded is started."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint: a directory or s3://bucket/prefix; without one the shipped one.")
    ] = None,
    renderer: Annotated[str, typer.Option(help="Chat format, by its name in `renderers`.")] = "qwen3",
    lake: Lake = "./lake",
    as_json: AsJson = False,
) -> None:
    """Check all that a batch needs: packages, tokenizer and renderer, engine, sessions, lake, clocks, disks, Prefect.

    A line per check: `ok`, `warn` or `fail`, what was looked at, and what to do about it. Exit code 1 if
    one failed. A few tokens are sampled; what is written to the lake to try its rights is removed again.

    \b
    Examples:
      rollout doctor
      rollout doctor --lake s3://bucket/lake
      rollout doctor --engine-url http://127.0.0.1:30000 --model ./Qwen3-8B
      rollout doctor --json | jq '.checks[] | select(.state != "ok")'
    """
    from flows import diagnose

    if diagnose.diagnose(engine_urls=engine_url, model=model, renderer=renderer, lake=lake, as_json=as_json):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: one line per error on stderr; exit code 2 for bad input, 1 for any other failure."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has gone, as in `rollout show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if os.environ.get("ROLLOUT_DEBUG"):
            raise
        code = _say(error)
    except BaseException as error:
        # SIGTERM ends a flow by asyncio's or by Prefect's exception, and neither may be imported here.
        if type(error).__name__ not in ("CancelledError", "TerminationSignal"):
            raise
        code = 143
    sys.exit(code or 0)


def _say(error: Exception) -> int:
    show_message = getattr(error, "format_message", None)  # the option parser's own errors
    known = show_message is not None or type(error).__module__.startswith("rollout.")
    text = " ".join((show_message() if show_message else str(error)).split())
    print(f"error: {text}" if known and text else f"error: {type(error).__name__}: {text}", file=sys.stderr)
    return 2 if isinstance(error, BadInput) else int(getattr(error, "exit_code", 1))
