"""Several models in one release: objects of their own, one router, and rolls that leave the others alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from baton.cli.autoscale import AutoscaleConfig
from cluster.config.router import RouterConfig
from tests.system.helm.rendering import Rendered, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
SEVERAL = VALUE_SETS["several models"]
WORKERS = [f"{role}{model}" for model in ("", "-small", "-hub") for role in ("prefill", "decode")]


@pytest.fixture(scope="module")
def rendered(renderer: Renderer) -> Rendered:
    return renderer.render(SEVERAL)


def config_of(rendered: Rendered, name: str, key: str) -> Any:
    return yaml.safe_load(rendered.named("ConfigMap", f"t-baton-{name}")["data"][key])


def checksums(rendered: Rendered) -> dict[str, str]:
    return {pod.component: pod.annotations["checksum/config"] for pod in pods_of(rendered) if pod.annotations}


def with_small(**more: Any) -> ValueSet:
    values = copy.deepcopy(dict(SEVERAL.values))
    for part, changed in more.items():
        values["models"][0].setdefault(part, {}).update(changed)
    return ValueSet(values=values)


def test_each_model_has_objects_of_its_own(rendered: Rendered) -> None:
    for kind in ("StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"):
        names = {one["metadata"]["name"] for one in rendered.of(kind)}
        assert {f"t-baton-{one}" for one in WORKERS} <= names, kind
    selectors = [one["spec"]["selector"]["matchLabels"] for one in rendered.of("StatefulSet")]
    assert len({str(sorted(one.items())) for one in selectors}) == len(selectors), (
        "none selects another's pods"
    )


def test_workers_register_the_name_that_the_router_serves(rendered: Rendered) -> None:
    router = RouterConfig.model_validate(config_of(rendered, "router", "router.yaml"))
    assert router.model_names == ("large", "small", "hub") and router.all_aliases == ("small-latest",)
    assert router.most_of_model("small") == 200 and router.by_model()["small"].max_model_len == 4096
    assert [one.tool_parser for one in router.by_model().values()] == ["auto", "hermes", "auto"]
    for one in WORKERS:
        config = config_of(rendered, one, "worker.yaml")
        named = config.get("served_model_name", "large")
        assert config["engine"]["model"] == str(router.by_model()[named].model), one
        assert named == (one.partition("-")[2] or "large")


def test_the_router_has_every_models_directory(rendered: Rendered) -> None:
    (router,) = [pod for pod in pods_of(rendered) if pod.component == "router"]
    (container,) = [one for one in router.containers if one["name"] == "router"]
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/models", "/models-small", "/models-hub"} <= mounted
    assert [one["name"] for one in router.spec["initContainers"]] == ["fetch-hub"]
    assert "--without-weights" in router.spec["initContainers"][0]["args"]


def test_kv_moves_within_a_model_only(rendered: Rendered) -> None:
    for one in WORKERS:
        role, _, model = one.partition("-")
        other = ("decode" if role == "prefill" else "prefill") + (f"-{model}" if model else "")
        policy = rendered.named("NetworkPolicy", f"t-baton-{one}-kv")["spec"]
        for direction, end in (("ingress", "from"), ("egress", "to")):
            (peer,) = policy[direction][0][end]
            assert peer["podSelector"]["matchExpressions"][0]["values"] == [other]


def test_a_change_of_one_model_rolls_that_model_and_the_routers_only(
    rendered: Rendered, renderer: Renderer
) -> None:
    before = checksums(rendered)
    batch = checksums(renderer.render(with_small(decode={"maxBatchRequests": 7})))
    assert {one for one in before if before[one] != batch[one]} == {"decode-small"}
    source = checksums(renderer.render(with_small(model={"source": "pvc://weights/small-2"})))
    changed = {one for one in before if before[one] != source[one]}
    assert changed == {"prefill-small", "decode-small", "router"}, "routers read the tokenizer"


def test_one_autoscaler_has_each_models_pools_and_objectives(rendered: Rendered) -> None:
    config = AutoscaleConfig.model_validate(config_of(rendered, "autoscaler", "autoscale.yaml"))
    small, hub = config.models
    assert (config.served_model_name, small.name, hub.name) == ("large", "small", "hub")
    assert config.of_model(small).ttft_objective_seconds == 0.5
    assert config.of_model(hub).ttft_objective_seconds == config.ttft_objective_seconds == 2
    assert (small.decode.max_replicas, hub.decode.max_replicas) == (2, 8)
    role = next(one for one in rendered.of("Role") if one["metadata"]["name"] == "t-baton-autoscaler")
    scaled = {f"t-baton-{one}" for one in WORKERS}
    assert set(role["rules"][0]["resourceNames"]) == scaled
    sets = [one.stateful_sets for one in (config, small, hub)]
    assert {name for one in sets for name in (one.prefill, one.decode)} == scaled


def test_what_belongs_to_the_first_model_is_no_further_ones(renderer: Renderer) -> None:
    """Its hash would refuse another model's files, and its draft model is neither mounted beside another nor has that
    one's tokenizer."""
    values = copy.deepcopy(dict(SEVERAL.values))
    values["model"] |= {"source": "hf://org/large@0123abc", "huggingFace": {"sha256": "a" * 64}}
    engine = {"draft_kv_memory_bytes": 1 << 20, "speculative_tokens": 7, "attention_backend": "sdpa"}
    values["decode"] = {"draftModel": "/models/draft", "config": {"engine": engine}}
    rendered = renderer.render(ValueSet(values=values))
    pods = {pod.component: pod for pod in pods_of(rendered)}
    fetched = {name: pods[name].spec["initContainers"][0]["args"] for name in ("decode", "decode-hub")}
    assert [f"--sha256={'a' * 64}" in args for args in fetched.values()] == [True, False]
    assert not any(one.startswith("--sha256") for one in fetched["decode-hub"])
    first, *others = (
        config_of(rendered, f"decode{one}", "worker.yaml")["engine"] for one in ("", "-small", "-hub")
    )
    assert engine.items() <= first.items() and first["draft_model"] == "/models/draft"
    for own in others:
        assert own["attention_backend"] == "sdpa", "the rest is taken over"
        assert not {"draft_model", "draft_kv_memory_bytes", "speculative_tokens"} & set(own)
    values["models"][0]["decode"]["draftModel"] = "/models-small/draft"
    again = config_of(renderer.render(ValueSet(values=values)), "decode-small", "worker.yaml")["engine"]
    assert again["draft_model"] == "/models-small/draft"


def test_each_revision_has_a_directory_of_its_own(renderer: Renderer) -> None:
    """In a claim, which pods of two releases share during an upgrade. A container of the release before that starts again
    reads the new path, so in a pod's own disk it stays the same."""
    found = []
    sources = ("@0123abc", "@4567def", "@main", "")
    for claim, revision in [*(("models", one) for one in sources), ("", "@0123abc")]:
        values = {"source": f"hf://org/large{revision}", "huggingFace": {"cacheClaim": claim}}
        rendered = renderer.render(ValueSet(values={"model": values}))
        path = config_of(rendered, "decode", "worker.yaml")["engine"]["model"]
        (pod,) = [one for one in pods_of(rendered) if one.component == "decode"]
        command = pod.spec["initContainers"][0]["command"]
        assert command[command.index("--out") + 1] == path
        assert config_of(rendered, "router", "router.yaml")["model"] == path
        found.append(path.removeprefix("/models/org--large"))
    assert found == ["--0123abc", "--4567def", "", "", ""]
