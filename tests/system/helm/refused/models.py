"""Several models."""

from __future__ import annotations

from typing import Any

from tests.system.helm.refused.form import Refusals


def _with_small(more: dict[str, Any], **values: Any) -> dict[str, Any]:
    small = {"name": "small", "model": {"source": "file:///small"}}
    return {"models": [{**small, **more}], **values}


REFUSED: Refusals = {
    "a label that chooses pods of a further model": (
        _with_small({"decode": {"pod": {"labels": {"app.kubernetes.io/name": "x"}}}}),
        "decode.pod.labels: app.kubernetes.io/name is the label by which Services and policies choose pods",
        "remove it",
    ),
    "a model named as a LeaderWorkerSet": (
        {
            "multiNode": {"by": "leaderWorkerSet"},
            "models": [{"name": "set", "model": {"source": "file:///x"}}],
        },
        "models[set]: with multiNode.by leaderWorkerSet the names set and groups are of the chart's own objects",
        "choose another",
    ),
    "adapters of a further model without slots": (
        {"models": [{"name": "small", "model": {"source": "pvc://w/s", "adapters": {"source": "pvc://a"}}}]},
        "models[small].model.adapters.source is set and models[small].model.adapters.slots is 0",
        "set slots",
    ),
    "an adapter named as a model": (
        {"model": {"servedName": "big", "adapters": {"slots": 1, "source": "pvc://a", "load": {"big": "x"}}}},
        "model.adapters.load: the name big is another adapter's, a model's or an alias too",
        "change one",
    ),
    "an adapter named as a further model's alias": (
        _with_small(
            {"aliases": ["tiny"]},
            model={"adapters": {"slots": 1, "source": "pvc://a", "load": {"tiny": "x"}}},
        ),
        "model.adapters.load: the name tiny is another adapter's, a model's or an alias too",
        "change one",
    ),
    "an adapter's name at two models": (
        _with_small(
            {
                "model": {
                    "source": "file:///small",
                    "adapters": {"slots": 1, "source": "pvc://b", "load": {"sql": "y"}},
                }
            },
            model={"adapters": {"slots": 1, "source": "pvc://a", "load": {"sql": "x"}}},
        ),
        "models[small].model.adapters.load: the name sql is another adapter's",
        "change one",
    ),
    "a name of two models": (
        _with_small({"aliases": ["big"]}, model={"servedName": "big"}),
        "models[small]: the name big is another model's too",
        "change one",
    ),
    "a further model named as the KV policy of another": (
        _with_small({"name": "small-kv"}),
        "models[small-kv]: names ranks, kv and *-kv are of the chart's own objects",
        "choose another",
    ),
    "a further model named as the first one's ranks": (
        _with_small({"name": "ranks"}),
        "models[ranks]: names ranks, kv and *-kv are of the chart's own objects",
        "choose another",
    ),
    "a further model whose StatefulSet makes no pods": (
        _with_small({}, fullnameOverride="a" * 39),
        f"models[small]: {'a' * 39}-prefill-small is longer than the 52 characters",
        "shorten the name, or set fullnameOverride",
    ),
    "several models in one Serve application": (
        _with_small({}, ray={"mode": "external", "external": {"dashboardUrl": "http://ray.ray:8265"}}),
        "models[small] needs ray.mode embedded or none",
        "one Serve application holds the workers of one model",
    ),
    "a further model without a directory": (
        _with_small({"model": {}}),
        "models[small].model.source is empty",
        "name the model's directory",
    ),
    "a page size of a further model's own": (
        _with_small({"model": {"source": "file:///small", "pageSize": 32}}),
        "models[small].model.pageSize can't be set",
        "use model.pageSize",
    ),
    "a budget of a further model's own": (
        _with_small({"autoscaling": {"gpuBudget": 3}}),
        "models[small].autoscaling.gpuBudget is shared by all models",
        "set autoscaling.gpuBudget",
    ),
    "a further model over several pods": (
        _with_small({"decode": {"nodes": 2, "gpus": 1, "tensorParallel": 2}}),
        "models[small]: workers of several pods (nodes above 1) are for the first model only",
        "a pod with all of its GPUs",
    ),
    "a further model's size twice": (
        _with_small({"decode": {"replicas": 2}}, autoscaling={"enabled": True}),
        "models[small]: autoscaling.enabled and decode.replicas both set the pool's size",
        "set models[small].autoscaling.decode.minReplicas",
    ),
    "a budget for some of the models": (
        _with_small({}, autoscaling={"enabled": True, "gpuBudget": 3}),
        "autoscaling.gpuBudget = 3, and the smallest pools of all models need 4",
        "raise it",
    ),
    "a further model's GPUs are not its ranks": (
        _with_small({"prefill": {"gpus": 2}}),
        "prefill: 2 GPUs × 1 nodes are not prefill.tensorParallel = 1",
        "set prefill.gpus × prefill.nodes equal",
    ),
}
