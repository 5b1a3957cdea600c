"""BatchConfig's fields as parameters of the flow and as options of the command: written once, in the model."""

from __future__ import annotations

import inspect
from types import NoneType
from typing import Annotated, Any, get_args

import typer
from pydantic import Field
from pydantic.fields import FieldInfo

from rollout.config import BatchConfig

NONE = "none"
"""What a user types for null where a field may be null."""
REPEATED = ("engine_url", "ray_modules")
"""Fields with commas between values whose option may also be given once for each."""


def flow_signature() -> inspect.Signature:
    """The batch flow's parameters: flat, each with bounds and default, as Prefect's form shows them."""
    return inspect.Signature([_flow_parameter(name, field) for name, field in BatchConfig.model_fields.items()])


def _flow_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = Annotated[(field.annotation, *field.metadata, Field(description=field.description))]  # type: ignore[name-defined]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kind)


def flow_docstring(summary: str) -> str:
    """A docstring whose Args section is the fields' descriptions: Prefect's form takes them from there."""
    lines = [f"    {name}: {field.description}" for name, field in BatchConfig.model_fields.items()]
    return "\n".join([summary, "", "Args:", *lines])


def cli_parameters() -> list[inspect.Parameter]:
    """One option per field. Their default is null, so that an option that was not given is known as such."""
    return [_cli_parameter(name, field) for name, field in BatchConfig.model_fields.items()]


def _cli_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    flags = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag
    default = NONE if field.default is None else field.default
    option = typer.Option(flags, help=field.description, show_default=str(default), metavar=_metavar(field))
    kind = bool if field.annotation is bool else list[str] if name in REPEATED else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _metavar(field: FieldInfo) -> str | None:
    if field.annotation is bool:
        return None
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not NoneType]
    if all(isinstance(kind, str) for kind in kinds):  # a Literal's choices
        return "|".join(kinds)
    return {str: "TEXT", int: "INTEGER", float: "NUMBER"}[kinds[0]]


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, `none` read as null where the field may be null."""
    return {name: _read(name, value) for name, value in values.items() if value is not None and value != []}


def _read(name: str, value: Any) -> Any:
    field = BatchConfig.model_fields[name]
    nullable = NoneType in get_args(field.annotation)
    value = ",".join(value) if name in REPEATED and not isinstance(value, str) else value
    return None if nullable and value == NONE else value
