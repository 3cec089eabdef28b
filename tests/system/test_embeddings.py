"""The unmodified `openai` package's embeddings, of a base model on a whole cluster, as of Hugging Face's model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.end_to_end.conftest import run_cluster
from tests.harness.checkpoints import prompt_ids
from tests.harness.cluster import Cluster
from tests.harness.embeddings import make_base_model, make_embedding_model, reference_embedding

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


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)
