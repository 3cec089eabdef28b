"""Three adapters in a running cluster: answers of the merged checkpoints over HTTP and gRPC, listed with their parent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.harness.adapters import make_adapter, merge
from tests.harness.checkpoints import prompt_ids, reference_greedy
from tests.harness.cluster import Cluster

pytestmark = pytest.mark.system
NEW = 12
PROMPT = prompt_ids(40)


@dataclass(frozen=True)
class Running:
    cluster: Cluster
    references: dict[str, Path]  # by the model that a request names


@pytest.fixture(scope="module")
def running(checkpoint, tmp_path_factory) -> Iterator[Running]:
    out, model = tmp_path_factory.mktemp("adapters"), checkpoint("llama")
    made = {f"team/a{i}": make_adapter(out / f"a{i}", model, seed=i, rank=4 * (i + 1)) for i in range(3)}
    merged = {name: merge(model, adapter, out / f"m{i}") for i, (name, adapter) in enumerate(made.items())}
    lora = [part for name, directory in made.items() for part in ("--lora", f"{name}={directory}")]
    later = make_adapter(out / "later" / "d", model, seed=9)
    make_adapter(out / "later" / "e", model, seed=10)
    merged["later"] = merge(model, later, out / "m-later")
    flags = (
        *PROCESS,
        "--served-model-name",
        "base",
        *lora,
        "--max-loras",
        "4",
        "--lora-dir",
        str(out / "later"),
    )
    with run_cluster(out, model, *flags) as cluster:
        yield Running(cluster, {**merged, "base": model})


@pytest.fixture(scope="module")
def client(running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.cluster.http}/v1", api_key="-", max_retries=0) as made:
        yield made


def answer(client: openai.OpenAI, model: str) -> tuple[list[int], int]:
    """Token ids, and how many of the prompt were cached."""
    given = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=NEW,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert given.model == model
    assert given.usage is not None and given.usage.prompt_tokens_details is not None
    token_ids: list[int] = given.choices[0].model_extra["token_ids"]  # type: ignore[index]
    return token_ids, given.usage.prompt_tokens_details.cached_tokens or 0


def test_models_are_listed_with_their_parent(client, running):
    parents = {model.id: getattr(model, "parent", None) for model in client.models.list()}
    assert parents == {
        name: None if name == "base" else "base" for name in running.references if name != "later"
    }
    assert client.models.retrieve("team/a1").id == "team/a1"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="team/a9", prompt="x")


def test_each_name_answers_as_its_merged_checkpoint(client, running):
    """In one batch, and again: a prefix that was cached is met by its own adapter only."""
    names = [name for name in running.references if name != "later"]
    expected = {name: reference_greedy(running.references[name], PROMPT, NEW) for name in names}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    with ThreadPoolExecutor(len(names)) as pool:
        first = dict(zip(names, pool.map(lambda name: answer(client, name), names), strict=True))
    again = {name: answer(client, name) for name in names}
    assert {name: tokens for name, (tokens, _) in first.items()} == expected
    assert {name: tokens for name, (tokens, _) in again.items()} == expected
    assert {cached for _, cached in first.values()} == {0}
    assert {cached for _, cached in again.values()} == {32}


def test_an_adapter_is_loaded_and_unloaded_while_the_cluster_serves(client, running):
    def call(what: str, **body: str) -> httpx.Response:
        return httpx.post(f"{running.cluster.http}/v1/{what}_lora_adapter", json=body, timeout=90)

    for path in ("../a0", "/etc", "d/../../a0", ""):
        assert call("load", lora_name="later", lora_path=path).status_code == 400
    with pytest.raises(openai.NotFoundError):
        answer(client, "later")
    assert call("load", lora_name="later", lora_path="d").status_code == 200
    assert call("load", lora_name="later", lora_path="d").status_code == 400
    began = time.monotonic()
    for path, field, says in (
        ("e", "max_loras", "unload one"),
        ("gone", "lora", "No such file"),
    ):
        refused = call("load", lora_name="more", lora_path=path)
        assert refused.status_code == 409, refused.text
        error = refused.json()["error"]
        assert error["param"] == field and says in error["message"]
    assert time.monotonic() - began < 30  # a worker looks once a second; waiting for it would take 60 s
    expected = reference_greedy(running.references["later"], PROMPT, NEW)
    assert answer(client, "later") == (expected, 0)
    assert answer(client, "team/a0")[0] == reference_greedy(running.references["team/a0"], PROMPT, NEW)
    assert call("unload", lora_name="later").status_code == 200
    assert call("unload", lora_name="later").status_code == 404
    assert call("unload", lora_name="team/a0").status_code == 404
    with pytest.raises(openai.NotFoundError):
        answer(client, "later")
