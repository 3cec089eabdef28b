"""The chart's schema: no key may be missing, other charts' globals are ignored, and the upper bounds of settings."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from annotated_types import Le, MultipleOf
from jsonschema import Draft7Validator

from cluster.config.base import Frozen
from cluster.config.worker import ROLES, EngineConfig, TransferConfig

CHART = Path(__file__).parents[2] / "deploy/helm/baton"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# Without YAML's anchors, by which a change of one mapping would change others.
VALUES: dict[str, Any] = json.loads(json.dumps(yaml.safe_load((CHART / "values.yaml").read_text())))


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
        if (value := values.get(camel_case(name))) is None:
            continue
        for one in field.metadata:
            if isinstance(one, Le):
                assert value.get("maximum") == one.le, f"{section}.{camel_case(name)}"
            if isinstance(one, MultipleOf):
                assert value.get("multipleOf") == one.multiple_of, f"{section}.{camel_case(name)}"


def _keys(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of all mappings that the schema knows the keys of."""
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict) and name not in ("resources", "nodeResources", "updateStrategy", "load"):
            yield from _keys(value, (*path, name))


def test_a_key_that_is_set_to_null_or_newer_than_the_release_is_named() -> None:
    """Helm takes it away from the values, and `--reuse-values` has none that is newer. Templates would stop at it with an
    error of Go's, or render what a process refuses, e.g. `processes: 0`."""
    assert Draft7Validator(SCHEMA).is_valid(VALUES)
    schema = Draft7Validator({"allOf": SCHEMA["allOf"]})
    for path in _keys(VALUES):
        values = copy.deepcopy(VALUES)
        holder = values
        for name in path[:-1]:
            holder = holder[name]
        found = holder.pop(path[-1])
        if path[-2:-1] == ("labels",) or found is None:  # a label of dashboards; empty by default
            assert schema.is_valid(values), path
        else:
            (problem,) = schema.iter_errors(values)
            assert problem.message == f"'{path[-1]}' is a required property", path


def test_a_model_beside_the_first_has_only_what_differs() -> None:
    more = {
        "name": "small",
        "model": {"source": "pvc://a/b"},
        "decode": {"pod": {"nodeSelector": {"a": "b"}}},
    }
    schema = Draft7Validator(SCHEMA)
    assert schema.is_valid({**VALUES, "models": [more]})
    assert not schema.is_valid({**VALUES, "models": [{**more, "decode": {"pods": {}}}]})


def test_globals_of_a_parent_chart_are_ignored() -> None:
    globals_ = {**VALUES["global"], "storageClass": "fast"}
    assert Draft7Validator(SCHEMA).is_valid({**VALUES, "global": globals_})
    assert not Draft7Validator(SCHEMA).is_valid({**VALUES, "global": {**globals_, "imageRegistry": 3}})
