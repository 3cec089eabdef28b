"""Two generating models with three adapters and a model of embeddings behind one router: each name answers as its own
reference and meets its own KV only, whatever happens to the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from threading import Event

import httpx
import numpy as np
import pytest

from baton.client import Client, Completion
from cluster.membership.reader import read_workers
from cluster.membership.registry import request_drain
from cluster.membership.types import WorkerInfo
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.end_to_end.registries import registry
from tests.harness.adapters import make_adapter, merge
from tests.harness.checkpoints import prompt_ids, reference_greedy
from tests.harness.cluster import Cluster
from tests.harness.embeddings import make_base_model, make_embedding_model, reference_embedding
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.system
NEW, CACHED, WITHIN = 12, 32, 1e-4
PARENTS = {"a/x": "a", "b/x": "b", "b/y": "b"}


@dataclass(frozen=True)
class Running:
    cluster: Cluster
    lora: Path  # --lora-dir
    models: dict[str, Path]
    references: dict[str, Path]  # by the name that a request gives

    def ask(self, name: str, seed: int) -> Completion:
        with Client(self.cluster.grpc) as client:
            return client.generate(prompt(seed), model=name, max_tokens=NEW, temperature=0, ignore_eos=True)

    def expected(self, name: str, seed: int) -> tuple[int, ...]:
        return tuple(reference_greedy(self.references[name], prompt(seed), NEW))

    def embed(self, seed: int) -> np.ndarray:
        body = {"model": "e", "input": prompt(seed)}
        answer = httpx.post(f"{self.cluster.http}/v1/embeddings", json=body, timeout=60).raise_for_status()
        return np.array(answer.json()["data"][0]["embedding"])

    def check_embedding(self, seed: int) -> None:
        vector = reference_embedding(self.models["a"], prompt(seed), "mean").numpy()
        np.testing.assert_allclose(self.embed(seed), vector / np.linalg.norm(vector), atol=WITHIN, rtol=0)

    def adapter(self, what: str, name: str, **more: str) -> None:
        body = {"lora_name": name, "model": name.partition("/")[0], **more}
        answer = httpx.post(f"{self.cluster.http}/v1/{what}_lora_adapter", json=body, timeout=90)
        assert answer.status_code == 200, answer.text

    def workers(self, model: str) -> list[WorkerInfo]:
        found = [one for one in read_workers(*registry(self.cluster)) if one.served_model == model]
        return [one for one in found if (one.state, one.lease) == ("ready", "live")]


def prompt(seed: int) -> list[int]:
    return prompt_ids(40, seed=seed)


@pytest.fixture(scope="module")
def running(checkpoint, tmp_path_factory) -> Iterator[Running]:
    """Files of the same adapter are loaded on both models: only the model tells their KV apart."""
    out = tmp_path_factory.mktemp("models-and-adapters")
    lora, models = out / "lora", {"a": checkpoint("llama"), "b": checkpoint("qwen2")}
    make_adapter(lora / "x", models["a"], seed=1, rank=8)
    make_adapter(lora / "y", models["b"], seed=2)
    merged = {
        name: merge(models[of], lora / name[-1], out / f"m{name[0]}{name[-1]}")
        for name, of in PARENTS.items()
    }
    base = make_base_model(make_embedding_model(models["a"], out / "base", "mean"))
    also = ("--also", f"b={models['b']}", "--also", f"e={base}")
    adapters = ("--lora", f"a/x={lora / 'x'}", "--max-loras", "3", "--lora-dir", str(lora))
    with run_cluster(out, models["a"], *PROCESS, "--served-model-name", "a", *also, *adapters) as cluster:
        made = Running(cluster, lora, models, {**models, **merged})
        for name in ("b/x", "b/y"):
            made.adapter("load", name, lora_path=name[-1])
        yield made


def test_each_name_answers_as_its_own_reference_and_shares_no_prefix(running: Running) -> None:
    names = list(running.references)
    expected = {name: running.expected(name, 0) for name in names}
    assert len(names) == len(set(expected.values())) == 5
    listed = httpx.get(f"{running.cluster.http}/v1/models", timeout=10).json()["data"]
    assert {one["id"]: one["parent"] for one in listed if one.get("parent")} == PARENTS
    with ThreadPoolExecutor(len(names)) as pool:
        first = dict(zip(names, pool.map(lambda name: running.ask(name, 0), names), strict=True))
    running.check_embedding(0)
    again = {name: running.ask(name, 0) for name in names}
    for answers, cached in ((first, 0), (again, CACHED)):
        assert {name: answer.token_ids for name, answer in answers.items()} == expected
        assert {answer.usage.cached_tokens for answer in answers.values()} == {cached}
    assert all(answer.timings.kv_bytes_shipped for answer in first.values()), "each is handed over"


def test_an_adapter_reloaded_under_its_name_never_meets_its_old_kv(running: Running, tmp_path: Path) -> None:
    """From the same directory, too. Its old files, once they are back, meet it: it was there all the time."""
    seen, model, directory = [], running.models["b"], running.lora / "again"
    for turn, seed in enumerate((3, 4, 3)):
        shutil.rmtree(directory, ignore_errors=True)
        make_adapter(directory, model, seed=seed)
        merged = merge(model, directory, tmp_path / f"merged{turn}")
        running.adapter("load", "b/again", lora_path="again")
        answer = running.ask("b/again", 1)
        assert answer.token_ids == tuple(reference_greedy(merged, prompt(1), NEW))
        assert answer.usage.cached_tokens == (0 if turn < 2 else CACHED)
        seen.append(answer.token_ids)
        running.adapter("unload", "b/again")
    assert seen[0] == seen[2] != seen[1]


def test_a_roll_of_one_model_leaves_the_others_untouched(running: Running) -> None:
    """Both of its workers are drained and replaced; successors load the adapters that calls have named."""
    names, seeds = [name for name in running.references if name[0] == "a"], range(20, 24)
    expected = {(name, seed): running.expected(name, seed) for name in names for seed in seeds}
    before = {model: {one.name for one in running.workers(model)} for model in ("a", "b", "e")}
    assert [len(one) for one in before.values()] == [2, 2, 2]
    rolled = Event()

    def load(_: int) -> int:
        """At least one more begins after the roll."""
        asked = cycle(expected)
        count = 0
        while True:
            last = rolled.is_set()
            for name, seed in islice(asked, len(names)):
                answer = running.ask(name, seed)
                assert answer.token_ids == expected[name, seed]
            running.check_embedding(seed)
            count += 1
            if last:
                return count

    def replaced() -> bool:
        now = running.workers("b")
        adapters = {frozenset(name for name, _ in one.adapters) for one in now}
        return (
            len(now) == 2
            and not {one.name for one in now} & before["b"]
            and adapters == {frozenset(("b/x", "b/y"))}
        )

    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load, i) for i in range(2)]
        try:
            for worker in running.workers("b"):
                assert request_drain(*registry(running.cluster), worker.worker_id)
            wait_for(replaced, 90, "two new workers of b")
        finally:
            rolled.set()
        assert all(one.result() > 1 for one in loads)
    assert {model: {one.name for one in running.workers(model)} for model in "ae"} == {
        model: before[model] for model in "ae"
    }
    for name in ("b", "b/x", "b/y"):
        answer = running.ask(name, 0)
        assert answer.token_ids == running.expected(name, 0) and answer.usage.cached_tokens == 0
