"""Two checkpoints behind one router of real processes: each answers as its own reference, whatever befalls the other."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.checkpoints import prompt_ids, reference_greedy
from tests.harness.router_process import python, run_router
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.system
# The second model's decode worker prefills: the first one's prefill worker is none of its own.
PLACED = (("prefill", "a"), ("decode", "a"), ("decode", "b"))
SECRET, COUNT, WAIT_SECONDS = "of two models 16", 8, 120.0


@contextlib.contextmanager
def worker(out: Path, role: str, name: str, model: Path, cluster: dict[str, Any]) -> Iterator[Any]:
    engine = {"model": str(model), "dtype": "float32", "kv_memory_bytes": 8 << 20, "threads": 1}
    file = out / f"{role}-{name}.json"
    file.write_text(json.dumps({**cluster, "served_model_name": name, "engine": engine}))
    with python("-m", "baton", role, "--config", str(file), log=out / f"{role}-{name}.log") as process:
        yield process


def get(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def complete(http: str, model: str) -> tuple[int, dict[str, Any]]:
    body = {"model": model, "prompt": prompt_ids(), "max_tokens": COUNT, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    asked = urllib.request.Request(
        f"{http}/v1/completions", json.dumps(body | more).encode(), {"content-type": "application/json"}
    )
    return get(asked)  # type: ignore[arg-type]


def wait_for_workers(http: str, count: int) -> None:
    wait_for(lambda: len(get(f"{http}/v1/cluster")[1]["workers"]) >= count, WAIT_SECONDS, f"{count} workers")


def wait_for_ready(http: str, missing: set[str]) -> None:
    def ready() -> bool:
        status, said = get(f"{http}/ready")
        return status == 200 and set(said.get("models", {})) == missing

    wait_for(ready, WAIT_SECONDS, f"all models but {missing} are ready")


def test_two_models_behind_one_router(tmp_path: Path, redis_url: str, checkpoint: Any) -> None:
    models = {"a": checkpoint("llama"), "b": checkpoint("qwen2")}
    cluster = {"redis_url": redis_url, "namespace": "two-models", "secret": SECRET}
    further = {"name": "b", "model": str(models["b"]), "aliases": ["bee"]}
    settings = {"model": str(models["a"]), "served_model_name": "a", "models": [further]}
    limits = {"local_prefill": "fallback", "admission_seconds": 1.0, "ttft_target_seconds_normal": 0.0}
    with contextlib.ExitStack() as held:
        http = held.enter_context(run_router(tmp_path, {**cluster, **settings, **limits})).http
        workers = {
            (role, name): held.enter_context(worker(tmp_path, role, name, models[name], cluster))
            for role, name in PLACED
        }
        wait_for_workers(http, len(PLACED))
        wait_for_ready(http, set())
        assert [one["id"] for one in get(f"{http}/v1/models")[1]["data"]] == ["a", "b"]
        for name, shown in (("a", "a"), ("bee", "b")):
            status, answer = complete(http, name)
            assert (status, answer["model"]) == (200, shown), answer
            expected = reference_greedy(models[shown], prompt_ids(), COUNT)
            assert answer["choices"][0]["token_ids"] == expected
            # The same tokens were computed for the other model just before.
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert complete(http, "a")[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert complete(http, "c")[0] == 404
        workers["decode", "b"].kill()
        wait_for_ready(http, {"b"})
        assert complete(http, "a")[0] == 200
        status, answer = complete(http, "b")
        assert status == 503 and "'b'" in answer["error"]["message"], answer
