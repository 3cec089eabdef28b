"""Random requests served by the fake model, for comparing ways to serve them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.engine import Engine
from engine.request import ChainReport, EngineRequest, FinishReason, SamplingParams, TokenOutput
from engine.sampling.device_sampler import DeviceSampler
from engine.speculation.draft_model import DraftRunner
from engine.speculation.per_sequence import PerSequence, Proposer
from tests.engine.fake_model import VOCAB, FakeRunner

CPU = torch.device("cpu")


@dataclass
class Seen:
    tokens: dict[tuple[str, int], list[TokenOutput]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    chains: set[tuple[bytes, ...]] = field(default_factory=set)

    def streams(self) -> dict[tuple[str, int], list[tuple[int, FinishReason | None]]]:
        return {key: [(one.token_id, one.finish) for one in tokens] for key, tokens in self.tokens.items()}


def some_requests(seed: int) -> list[EngineRequest]:
    rng, of_words = random.Random(seed), random.Random(seed + 1000)
    requests = []
    for i in range(24):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0, 3.0]),
            top_p=rng.choice([1.0, 0.9]),
            seed=i,
            max_tokens=rng.randint(1, 30),
            min_tokens=rng.choice([0, 0, 5]),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(rng.sample(range(3, 97), rng.choice([0, 8]))),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
            logprobs=rng.random() < 0.3,
            top_logprobs=2,
            **_exclusions(of_words),
        )
        prompt = [rng.randint(3, 6) for _ in range(rng.randint(1, 20))]
        requests.append(EngineRequest(f"r{i}", prompt, params, n=rng.choice([1, 1, 2, 3])))
    return requests


def _exclusions(rng: random.Random) -> dict[str, Any]:
    """Of a third of the requests: half of the tokens, some words of one token, or a few of two."""
    tokens = [rng.sample(range(VOCAB), 48) for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {"allowed_tokens": sum(1 << token for token in {2, *tokens[0]}).to_bytes(13, "little")},
        {"bad_words": tuple((token,) for token in tokens[0])},
        {"bad_words": tuple(zip(*tokens, strict=True))},
    ]
    return rng.choices([{}, *kinds], weights=[16, 4, 3, 1])[0]


def serve(
    overlap: str,
    seed: int,
    *,
    blocks: int = 400,
    device: bool = False,
    aborted: bool = False,
    proposer: Callable[[], Proposer] | None = None,
    draft: DraftRunner | None = None,
    **settings: Any,
) -> tuple[Seen, FakeRunner, Engine]:
    runner = FakeRunner(blocks, overlap=overlap, **settings)
    seen = Seen()

    def on_chain(report: ChainReport) -> None:
        if report.held:
            assert report.held <= len(report.hashes)
            seen.chains.add(tuple(report.hashes[: report.held]))

    engine = Engine(runner, runner.config, secret=b"o", on_chain=on_chain, draft=draft)
    engine._drafter.gate = None
    if proposer is not None:
        engine._drafter.method = PerSequence(proposer)
    if device:
        engine._outputs._sampler = DeviceSampler(CPU)
    rng, requests, count = random.Random(seed), some_requests(seed), 0
    while requests or engine.has_work:
        if requests and (not engine.has_work or rng.random() < 0.15):
            engine.add(requests.pop())
        if aborted and rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(24)}")
        output = engine.step()
        engine.check_integrity()
        assert all(token >= 0 for s in engine._scheduler.sequences() for token in s.tokens)
        for token in output.tokens:
            stream = seen.tokens.setdefault((token.request_id, token.choice), [])
            assert not stream or (stream[-1].position + 1 == token.position and stream[-1].finish is None)
            stream.append(token)
        for done in output.done:
            if done.error is not None:
                seen.errors[done.request_id] = done.error.message
        count += 1
        assert count < 5000
    assert engine.stats().blocks_held == 0
    return seen, runner, engine
