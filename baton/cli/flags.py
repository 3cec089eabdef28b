"""Command-line flags made from settings models (cluster/config): name, type, default and help are the model's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from rich.markup import escape

from cluster.config.base import Frozen, Setting, flags, settings

F = TypeVar("F", bound=Callable[..., Any])


class Flags:
    """The flags of one or several models; a setting that several have under one name is one flag."""

    def __init__(self, *models: type[Frozen], without: Collection[str] = ()):
        """`without`: flags left out."""
        self._names = {
            model: {path: name for path, name in flags(model).items() if name not in without}
            for model in models
        }

    def add_to(self, command: F) -> F:
        """Give a command the flags as further parameters; its `**` parameter takes them."""
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*own, *self._parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in [*own, *self._parameters]}
        return command

    def values(self, model: type[Frozen], given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the flags that were given, nested as `model` is."""
        nested: dict[str, Any] = {}
        for path, name in self._names[model].items():
            if (value := given.get(name)) in (None, []):
                continue
            holder = nested
            for part in path[:-1]:
                holder = holder.setdefault(part, {})
            holder[path[-1]] = value.absolute() if isinstance(value, Path) else value
        return nested

    @cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        made: dict[str, inspect.Parameter] = {}
        for model, names in self._names.items():
            for one in settings(model):
                if (name := names.get(one.path)) is not None and name not in made:
                    made[name] = self._parameter(name, one)
        return list(made.values())

    def _parameter(self, name: str, one: Setting) -> inspect.Parameter:
        text = escape(one.field.description or "")
        if one.default:
            text += f" [dim]default: {escape(one.default)}[/dim]"
        option = typer.Option(
            help=text,
            rich_help_panel=one.panel,
            show_default=False,
            envvar=one.named_environment,
            show_envvar=False,
            metavar="SIZE" if one.is_size else None,
        )
        kind = str if one.is_size else _option_type(one.field.annotation)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
        )


def _option_type(annotation: Any) -> Any:
    """The type to which Typer parses a flag with this annotation; the model checks the rest."""
    if get_origin(annotation) in (UnionType, Union):
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    return list[str] if get_origin(annotation) is tuple else annotation
