"""The settings that the environment gives (`BATON_…`), apart from files and flags."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from cluster.config.base import Frozen, settings
from cluster.config.unknown import no_such_setting
from cluster.errors import ConfigError

PREFIX, NESTED = "BATON_", "__"
SETTINGS = SettingsConfigDict(
    env_prefix=PREFIX, env_nested_delimiter=NESTED, frozen=True, extra="forbid", allow_inf_nan=False
)
_FINITE = ConfigDict(allow_inf_nan=False)  # as Frozen


def from_environment(config: type[Frozen], without: Collection[str] = ()) -> dict[str, Any]:
    """The settings of `config` that the environment gives, checked one by one and nested as `config` is; paths are
    absolute. An empty variable gives none, as with flags. `without`: names of settings that are not read. Raises
    ConfigError naming the variable."""

    class Environment(config, BaseSettings):  # type: ignore[valid-type, misc]
        model_config = SETTINGS

    try:
        given = EnvSettingsSource(Environment, env_ignore_empty=True)()
    except SettingsError as error:
        raise not_json(error) from None
    return dict(_checked(config, config, given, (), without))


def _checked(
    root: type[Frozen],
    model: type[Frozen],
    given: Mapping[str, Any],
    above: tuple[str, ...],
    without: Collection[str],
) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if name in without:
            continue
        path = (*above, name)
        field = model.model_fields.get(name)
        if field is None:
            raise _refused(path, no_such_setting(root, path))
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Frozen):
            if not isinstance(value, Mapping):
                raise _refused(path, "Input must be JSON, as {…}")
            yield name, dict(_checked(root, kind, value, path, without))
            continue
        try:
            checked = TypeAdapter(_as_field(kind, field), config=_FINITE).validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")
            raise _refused(path, reason) from None
        yield name, checked.absolute() if isinstance(checked, Path) else checked


def _as_field(kind: Any, field: FieldInfo) -> Any:
    """The field's type with its bounds and its reading of sizes."""
    return Annotated[kind, *field.metadata] if field.metadata else kind


def _refused(path: tuple[str, ...], reason: str) -> ConfigError:
    """Names the variable of a setting, or of the section that holds it and then what of it."""
    present = {one.upper() for one in os.environ}
    lengths = range(len(path), 0, -1)
    found = next((one for one in lengths if _variable(path[:one]) in present), len(path))
    where = ": ".join([_variable(path[:found]), *(".".join(path[found:]),) * (found < len(path))])
    return ConfigError(f"{where}: {reason}", field=".".join(path))


def _variable(path: Sequence[str]) -> str:
    return PREFIX + NESTED.join(path).upper()


def empty_variable(path: Sequence[str]) -> str:
    """The variable that gives a setting an empty text, as the environment writes it; "" = none does."""
    wanted = _variable(path)
    return next((name for name, value in os.environ.items() if name.upper() == wanted and not value), "")


def refuse_empty_paths(config: type[Frozen], flags: Mapping[str, Any]) -> None:
    """Raise ConfigError for an empty variable of a file or directory that no flag names: it would mean the directory in
    which the process was started."""
    for one in settings(config):
        kinds = (one.field.annotation, *get_args(one.field.annotation))
        if Path not in kinds or _holds(flags, one.path):
            continue
        if variable := empty_variable(one.path):
            raise ConfigError(
                f"{variable} is empty: unset it, or name a file or directory", field=".".join(one.path)
            )


def _holds(given: Any, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(given, Mapping) or name not in given:
            return False
        given = given[name]
    return True


def variables(config: type[Frozen]) -> set[str]:
    """The environment's variables that give settings of `config`."""
    names = {name.upper() for name in config.model_fields}
    return {
        variable
        for variable in os.environ
        if variable.upper().startswith(PREFIX)
        and variable.upper().removeprefix(PREFIX).partition(NESTED)[0] in names
    }


def not_json(error: SettingsError) -> ConfigError:
    """A variable of a field that holds others, or of a list."""
    (field,) = re.findall(r'field "(\w+)"', str(error)) or [""]
    return ConfigError(
        f"configuration is not valid: {PREFIX}{field.upper()} must be JSON, as {{…}} or […]", field=field
    )
