"""The chart's schema has the upper bounds of the settings that its values become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Le

from cluster.config.base import Frozen
from cluster.config.worker import ROLES, EngineConfig, TransferConfig

SCHEMA = json.loads((Path(__file__).parents[2] / "deploy/helm/baton/values.schema.json").read_text())


def camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(one.title() for one in others)


@pytest.mark.parametrize(
    ("section", "model"),
    [*((role, EngineConfig) for role in ROLES), ("model", EngineConfig), ("transfer", TransferConfig)],
)
def test_a_value_that_a_worker_refuses_is_refused_by_the_chart(section: str, model: type[Frozen]) -> None:
    values: dict[str, Any] = SCHEMA["properties"][section]["properties"]
    for name, field in model.model_fields.items():
        bounds = [one.le for one in field.metadata if isinstance(one, Le)]
        if bounds and (value := values.get(camel_case(name))) is not None:
            assert value.get("maximum") == bounds[0], f"{section}.{camel_case(name)}"
