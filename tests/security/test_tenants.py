"""A tenant learns nothing of others' prompts: no cached token, no smaller transfer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from baton.client import Client
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.harness.checkpoints import prompt_ids
from tests.harness.router import KeyFile

PROMPT = 120


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_prefix_is_shared_within_a_tenant_only(shared, checkpoint, tmp_path):
    keys = KeyFile(tmp_path / "keys.yaml")
    mine, again, probing = keys.add("mine"), keys.add("mine"), keys.add("probing", admin=True)
    flags = ["--api-keys-file", str(keys.path), *PROCESS]
    flags += ["--share-prefixes-across-tenants"] if shared else []
    prompt = prompt_ids(PROMPT)

    with run_cluster(tmp_path / "cluster", checkpoint("llama"), *flags) as cluster:

        def ask(key: str, prompt: list[int] = prompt) -> tuple[int, int, list[int]]:
            with Client(cluster.grpc, api_key=key) as client:
                said = client.generate(prompt, max_tokens=4, temperature=0)
            assert said.usage is not None and said.timings is not None
            return said.usage.cached_tokens, said.timings.not_shipped_tokens, list(said.choices[0].token_ids)

        def hits(key: str) -> bool:
            """Within some requests: a worker that stood still for a moment is avoided for one."""
            return any(ask(key)[0] >= PROMPT // 2 for _ in range(5))

        first = ask(mine)
        assert first[:2] == (0, 0)
        assert hits(mine)
        assert hits(again), "another key of the same tenant"
        cached, not_shipped, tokens = ask(probing)
        assert tokens == first[2]
        if shared:  # by the first answer, or another prompt's: its own second one would prove nothing
            others = (prompt_ids(PROMPT, seed=seed) for seed in (1, 2, 3))
            assert cached >= PROMPT // 2 or any(
                ask(mine, other) and ask(probing, other)[0] >= PROMPT // 2 for other in others
            )
        else:
            assert (cached, not_shipped) == (0, 0)
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            probe = {"authorization": f"Bearer {mine}"}

            def cached_of(asked: dict[str, Any]) -> int:
                answer = httpx.post(f"{cluster.http}/v1/completions", json=asked, headers=probe, timeout=30)
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert any(cached_of(body) >= PROMPT // 2 for _ in range(5))

            def salted(salt: str) -> int:
                return cached_of({**body, "cache_salt": salt})

            assert salted("one") == 0, "the prompt is cached, without a salt"
            assert any(salted("one") >= PROMPT // 2 for _ in range(5))
            assert salted("another") == 0
