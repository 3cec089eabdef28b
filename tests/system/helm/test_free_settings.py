"""The free-form `config` maps take what the chart has no value for, and nothing else: what it writes itself is refused
there, or its checks, ports and policies would follow one setting and the process another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from baton.cli.autoscale import AutoscaleConfig
from cluster.config.base import Frozen, settings
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig
from tests.system.helm.rendering import CHART, Rendered, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
SETS = ("own certificates", "own secrets", "multi-node", "autoscaling", "autoscaling on an external Ray")
CONFIGS: dict[str, type[Frozen]] = {
    "router": RouterConfig,
    "prefill": WorkerConfig,
    "autoscaling": AutoscaleConfig,
}
# Nothing to set in their place.
GIVEN = ("nothing: it is the pod's ", "the release's name", "the release's namespace", "the pool's own name")


def _files(rendered: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whose configuration, and what the chart writes into it."""
    for one in rendered.of("ConfigMap"):
        data = {name: yaml.safe_load(text) for name, text in one["data"].items() if name.endswith(".yaml")}
        if "router.yaml" in data:
            yield "router", data["router.yaml"]
        if "worker.yaml" in data and data["worker.yaml"]["role"] == "prefill":
            yield "prefill", data["worker.yaml"]
        if "autoscale.yaml" in data:
            yield "autoscaling", data["autoscale.yaml"]
        if "serve.yaml" in data:
            yield "autoscaling", data["serve.yaml"]["applications"][0]["args"]["autoscaling"]


def _environment(rendered: Rendered) -> Iterator[tuple[str, str]]:
    """Whose, and which settings come by the environment, which goes before the file."""
    whose = {"router": "router", "prefill": "prefill", "autoscaler": "autoscaling"}
    for pod in pods_of(rendered):
        if part := whose.get(pod.component):
            for variable in pod.spec["containers"][0]["env"]:
                field = variable["name"].removeprefix("BATON_").lower()
                if variable["name"].startswith("BATON_") and field in CONFIGS[part].model_fields:
                    yield part, field


def _flat(settings: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and name != "stateful_sets":
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def _written(renderer: Renderer) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for name in SETS:
        rendered = renderer.render(VALUE_SETS[name])
        found |= {(part, setting) for part, settings in _files(rendered) for setting in _flat(settings)}
        found |= set(_environment(rendered))
    # An example puts it there, and it is no value of the chart's.
    return found - {("autoscaling", "scale_down_seconds")}


@pytest.mark.timeout(600)
def test_settings_that_the_chart_sets_are_refused_there(renderer: Renderer) -> None:
    written = sorted(_written(renderer))
    assert len(written) > 60
    sets = [ValueSet(values={part: {"config": _nested(setting)}}) for part, setting in written]
    for (part, setting), rendered in zip(written, renderer.render_all(sets), strict=True):
        named = f"{part}.config.{setting} would "
        assert rendered.code != 0 and named in rendered.error, (part, setting, rendered.error)
        (instead,) = re.findall(r"would .*: use (.+)", rendered.error)
        assert instead.startswith(GIVEN) or _is_a_value(instead), instead


def _nested(setting: str) -> dict[str, Any]:
    holder, _, name = setting.rpartition(".")
    return {holder: {name: 7}} if holder else {name: 7}


def _is_a_value(path: str) -> bool:
    found: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    for part in path.split("."):
        if part not in found:
            return False
        found = found[part]
    return True


def test_decode_is_held_to_the_same(renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values={"decode": {"config": {"engine": {"tensor_parallel": 2}}}}))
    assert "decode.config.engine.tensor_parallel would go behind" in rendered.error
    assert "use decode.tensorParallel" in rendered.error


def test_whole_experts_are_a_pools_own_value(renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values={"decode": {"expertParallel": True}}))
    texts = [one["data"]["worker.yaml"] for one in rendered.of("ConfigMap") if "worker.yaml" in one["data"]]
    workers = [yaml.safe_load(text) for text in texts]
    assert {one["role"]: one["engine"].get("expert_parallel") for one in workers} == {
        "prefill": None,
        "decode": True,
    }
    again = renderer.render(ValueSet(values={"decode": {"config": {"engine": {"expert_parallel": True}}}}))
    assert "use decode.expertParallel" in again.error


def test_speculation_is_of_decode_workers(renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values={"decode": {"speculation": "ngram"}}))
    texts = [one["data"]["worker.yaml"] for one in rendered.of("ConfigMap") if "worker.yaml" in one["data"]]
    workers = [yaml.safe_load(text) for text in texts]
    assert {one["role"]: one["engine"].get("speculation") for one in workers} == {
        "prefill": None,
        "decode": "ngram",
    }
    for role, setting in (
        ("decode", "speculation"),
        ("decode", "speculative_tokens"),
        ("prefill", "speculation"),
        ("prefill", "speculative_tokens"),
    ):
        again = renderer.render(ValueSet(values={role: {"config": {"engine": {setting: 7}}}}))
        assert f"{role}.config.engine.{setting} would go behind" in again.error
    both = {"speculation": "ngram", "config": {"engine": {"speculative_tokens": 7}}}
    assert renderer.render(ValueSet(values={"decode": both})).code == 0


def test_a_draft_model_is_of_decode_workers(renderer: Renderer) -> None:
    more = {"engine": {"speculative_tokens": 7, "draft_kv_memory_bytes": 1 << 20}}
    rendered = renderer.render(ValueSet(values={"decode": {"draftModel": "/models/small", "config": more}}))
    texts = [one["data"]["worker.yaml"] for one in rendered.of("ConfigMap") if "worker.yaml" in one["data"]]
    workers = [yaml.safe_load(text) for text in texts]
    assert {one["role"]: one["engine"].get("draft_model") for one in workers} == {
        "prefill": None,
        "decode": "/models/small",
    }
    for role in ("prefill", "decode"):
        for setting in ("draft_model", "draft_kv_memory_bytes"):
            again = renderer.render(ValueSet(values={role: {"config": {"engine": {setting: 7}}}}))
            assert f"{role}.config.engine.{setting} would go behind" in again.error
    both = renderer.render(
        ValueSet(values={"decode": {"draftModel": "/models/small", "speculation": "ngram"}})
    )
    assert "decode.draftModel and decode.speculation ngram exclude each other" in both.error


def test_addresses_of_foreign_nodes_are_not_the_charts(renderer: Renderer) -> None:
    values = {
        "ray": {"mode": "external", "external": {"dashboardUrl": "http://ray:8265"}},
        "prefill": {"config": {"host": "0.0.0.0"}},
    }
    assert renderer.render(ValueSet(values=values)).code == 0


@pytest.mark.parametrize(
    ("part", "config", "named"),
    [
        ("router", {"max_concurent_requests": 2048}, "max_concurent_requests"),
        ("prefill", {"engine": {"max_batch_tokns": 512}}, "max_batch_tokns"),
        ("decode", {"max_concurrent_requests": 2048}, "max_concurrent_requests"),
        ("autoscaling", {"scale_down_second": 60}, "scale_down_second"),
    ],
)
def test_a_name_that_no_setting_has_is_refused_before_anything_is_installed(
    part: str, config: dict[str, Any], named: str, renderer: Renderer
) -> None:
    """Not by the pods, one restart after the other."""
    rendered = renderer.render(ValueSet(values={part: {"config": config}}))
    assert rendered.code != 0 and part in rendered.error and named in rendered.error


@pytest.mark.parametrize(("part", "model"), CONFIGS.items())
def test_every_setting_is_a_name_there(part: str, model: type[Frozen]) -> None:
    names = json.loads((CHART / "values.schema.json").read_text())["properties"][part]
    if "$ref" in names:
        schema = json.loads((CHART / "values.schema.json").read_text())
        names = schema["definitions"][names["$ref"].rpartition("/")[2]]
    for setting in settings(model):
        holder = names["properties"]["config"]
        for name in setting.path:
            holder = holder["properties"][name]
