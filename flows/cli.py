"""The `rollout` command. Prefect is imported only by commands that start a flow."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout import __version__

app = typer.Typer(name="rollout", no_args_is_help=True, help="Agentic RL rollouts as a batch job.")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Agentic RL rollouts as a batch job: every sample a parquet row, proven bit for bit, then published."""


def main() -> None:
    """Entry point of the `rollout` command."""
    app()
