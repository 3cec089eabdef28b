"""Reasons of pydantic's for refusing a setting, in words that say what to write."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from cluster.config.base import Frozen, Setting, flag_text, flags, settings


def reason(problem: ErrorDetails, model: type[Frozen]) -> str:
    """The reason without the setting's name, unless one is missing: a section's names the settings that it needs."""
    path = tuple(map(str, problem["loc"]))
    below = [one for one in settings(model) if one.path[: len(path)] == path]
    if problem["type"] == "missing" and (required := [one for one in below if one.field.is_required()]):
        return "; ".join(_missing(one, model) for one in required)
    if problem["type"] == "string_pattern_mismatch" and len(below) == 1 and below[0].field.description:
        return f"write {below[0].field.description}"
    return problem["msg"].removeprefix("Value error, ")


def _missing(one: Setting, model: type[Frozen]) -> str:
    flag = flags(model).get(one.path)
    ways = [f"{flag_text(flag)}"] if flag else []
    return (
        f"{'.'.join(one.path)} is missing ({one.field.description}): give "
        f"{', '.join([*ways, one.environment])}, or name it in the file of --config"
    )
