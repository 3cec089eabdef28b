"""The unmodified `openai` package's embeddings, of a whole cluster, equal those of Hugging Face's model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from baton.client import Client
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import assert_reference
from tests.harness.checkpoints import prompt_ids
from tests.harness.cluster import Cluster
from tests.harness.embeddings import make_base_model, make_embedding_model, reference_embedding
from tests.harness.router import KeyFile
from tests.harness.waiting import wait_for
from wire import inference_pb2 as pb
from wire.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.system
FLAGS = ("--pool", "process", "--dtype", "float32", "--kv-memory", "64MiB", "--prefill", "2", "--decode", "1")
INPUTS = [prompt_ids(40 + seed, seed=seed) for seed in range(8)]
SHORTER = 16
WITHIN = (
    1e-4  # of vectors of length 1: hidden states of size 1 differ by as much in tests/engine/test_pooling.py
)


@pytest.fixture(scope="module")
def served(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    model, out = checkpoint("llama"), tmp_path_factory.mktemp("embeddings")
    base = make_base_model(make_embedding_model(model, out / "base", "mean", matryoshka_dimensions=[SHORTER]))
    with run_cluster(out / "cluster", base, *FLAGS) as cluster:
        yield model, cluster


def test_vectors_are_the_references_also_when_a_prefill_worker_is_killed(
    served: tuple[Path, Cluster],
) -> None:
    model, cluster = served
    wanted = np.stack([_unit(reference_embedding(model, one, "mean").numpy()) for one in INPUTS])
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="-", max_retries=0, timeout=60) as client:

        def ask(**more: Any) -> np.ndarray:
            made = client.embeddings.create(model="", input=INPUTS, **more)
            tokens = sum(map(len, INPUTS))
            assert (made.usage.prompt_tokens, made.usage.total_tokens) == (tokens, tokens)
            assert [one.index for one in made.data] == list(range(len(INPUTS)))
            return np.array([one.embedding for one in made.data], dtype=np.float32)

        floats, coded = ask(encoding_format="float"), ask()  # the package asks for base64 by default
        np.testing.assert_allclose(floats, wanted, atol=WITHIN, rtol=0)
        np.testing.assert_allclose(coded, wanted, atol=WITHIN, rtol=0)
        cut = np.stack([_unit(one[:SHORTER]) for one in wanted])
        np.testing.assert_allclose(ask(dimensions=SHORTER), cut, atol=WITHIN, rtol=0)
        with pytest.raises(openai.BadRequestError, match="base model"):
            client.completions.create(model="", prompt="a")
        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(ask) for _ in range(30)]
            answers[3].result()
            os.kill(cluster.state["prefill"][0]["pid"], signal.SIGKILL)
            for one in answers:
                np.testing.assert_allclose(one.result(), wanted, atol=WITHIN, rtol=0)


@pytest.fixture(scope="module")
def mixed(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    """A whole model that makes embeddings too, on a prefill worker of two ranks that computes prompts in chunks."""
    out = tmp_path_factory.mktemp("mixed")
    model = make_embedding_model(checkpoint("llama"), out / "model", "lasttoken")
    keys = KeyFile(out / "keys.yaml")
    known = Mixed(
        model, keys.add("acme"), keys.add("few", requests_per_minute=2), keys.add("ops", admin=True)
    )
    flags = (*FLAGS[:-4], "--prefill-tp", "2", "--max-batch-tokens", "32", "--api-keys-file", str(keys.path))
    with run_cluster(out / "cluster", model, *flags) as known.cluster:
        yield known


@dataclass
class Mixed:
    model: Path
    acme: str
    few: str
    ops: str
    cluster: Cluster = field(init=False)

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.cluster.http}/v1", api_key=key, max_retries=0, timeout=60)

    def idle(self) -> bool:
        """Nothing is held for any request, at the router and its workers."""
        headers = {"authorization": f"Bearer {self.ops}"}
        view = httpx.get(f"{self.cluster.http}/v1/cluster", headers=headers, timeout=10).json()
        held = [one["status"][name] for one in view["workers"] for name in ("blocks_held", "attempts")]
        return not any(held) and view["router"]["requests_in_flight"] == 0


def test_vectors_beside_generations_on_two_ranks_and_over_grpc(mixed: Mixed) -> None:
    texts = ["Once upon a time", "ab"]
    ids = [Tokenizer.from_file(str(mixed.model / "tokenizer.json")).encode(one).ids for one in texts]
    asked: list[Any] = [*INPUTS, *texts]
    wanted = np.stack(
        [_unit(reference_embedding(mixed.model, one, "lasttoken").numpy()) for one in [*INPUTS, *ids]]
    )
    prompt = prompt_ids(100, seed=20)

    def generated(_: int) -> list[int]:
        with Client(mixed.cluster.grpc, api_key=mixed.acme) as client:
            return list(client.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True).token_ids)

    def embedded(_: int) -> np.ndarray:
        with mixed.client(mixed.acme) as client:
            made = [
                one.embedding
                for given in (INPUTS, texts)  # of either, in one request
                for one in client.embeddings.create(model="", input=given).data
            ]
        return np.array(made, dtype=np.float32)

    with ThreadPoolExecutor(4) as threads:
        tokens = threads.map(generated, range(4))
        vectors = [*threads.map(embedded, range(4))]
    for found in vectors:
        np.testing.assert_allclose(found, wanted, atol=WITHIN, rtol=0)
    for answered in tokens:
        assert_reference(mixed.model, prompt, answered)
    request = pb.EmbedRequest(
        input=[
            pb.EmbedInput(text=one) if isinstance(one, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
            for one in asked
        ]
    )
    with grpc.insecure_channel(mixed.cluster.grpc) as channel:
        answer = InferenceStub(channel).Embed(
            request, metadata=(("authorization", f"Bearer {mixed.acme}"),), timeout=60
        )
    found = np.array([one.values for one in answer.embeddings], dtype=np.float32)
    np.testing.assert_allclose(found, wanted, atol=WITHIN, rtol=0)
    wait_for(mixed.idle, 30, "nothing is held")


def test_what_is_refused_or_cancelled_leaves_nothing_held(mixed: Mixed) -> None:
    with mixed.client(mixed.acme) as client:
        refusals: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
            ({"input": [5] * 5000}, openai.BadRequestError, "input"),
            ({"input": ["a"] * 65}, openai.BadRequestError, "input"),
            ({"input": "a", "dimensions": 3}, openai.BadRequestError, "dimensions"),
            ({"input": "a", "model": "other"}, openai.NotFoundError, "model"),
            ({"input": "a", "extra_body": {"priority": "high"}}, openai.PermissionDeniedError, "priority"),
        ]
        for more, kind, param in refusals:
            with pytest.raises(kind) as caught:
                client.embeddings.create(**{"model": "", **more})
            assert caught.value.param == param
    with mixed.client(mixed.few) as client, pytest.raises(openai.RateLimitError) as limited:
        client.embeddings.create(model="", input=INPUTS[:3])
    assert limited.value.param == "requests_per_minute"
    wait_for(mixed.idle, 30, "nothing is held")
    headers = {"authorization": f"Bearer {mixed.acme}"}
    limits = httpx.Timeout(30, read=0.05)
    for turn in range(3):
        # Hundreds of steps, of which the cache has none: the client leaves in the middle on a fast machine too.
        body = {"input": [prompt_ids(200, seed=100 * (turn + 1) + one) for one in range(32)]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{mixed.cluster.http}/v1/embeddings", json=body, headers=headers, timeout=limits)
    wait_for(mixed.idle, 30, "nothing is held")


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)
