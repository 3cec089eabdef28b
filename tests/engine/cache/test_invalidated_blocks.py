"""Blocks whose keys and values led to logits that are not finite leave the prefix cache with the request that failed,
and so do the blocks computed from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cluster.errors import EngineRequestError
from cluster.protocol.block_hash import hash_blocks, pack_tokens
from cluster.protocol.pooling import Pooling
from engine.cache.block_pool import BlockPool
from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import ChainReport, EngineRequest, RequestDone, SamplingParams, TokenOutput
from tests.engine.fake_model import PAGE, VOCAB, FakeRunner, continuation
from tests.engine.ranks import make_engine
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import assert_greedy

SECRET, SALT, NEW = b"p", bytes(16), 6
NOT_A_NUMBER = VOCAB + 1  # where the fake model's cache holds tokens
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11]


class HurtRunner(FakeRunner):
    """What was computed from a hurt block is hurt as well."""

    def hurt(self, block: int) -> None:
        self.cache[block] = NOT_A_NUMBER

    def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().execute(plan, drawn)
        wanting = iter(range(len(logits)))
        for item in plan.items:
            used = self.cache[item.block_ids[: -(-item.end // PAGE)]].flatten()[: item.end]
            hurt = bool((used == NOT_A_NUMBER).any())
            if hurt:
                self.store(item.block_ids, item.begin, [NOT_A_NUMBER] * len(item.token_ids))
            if item.num_logits:
                row = next(wanting)
                if hurt:
                    logits[row] = math.nan
        return logits


def engine_of(**settings: Any) -> tuple[HurtRunner, Engine, dict[bytes, bool]]:
    """Also returns what a listener to all chain reports takes for cached."""
    runner, known = HurtRunner(64, **settings), {}

    def told(report: ChainReport) -> None:
        known.update({block: depth < report.held for depth, block in enumerate(report.hashes)})

    return runner, Engine(runner, runner.config, secret=SECRET, on_chain=told), known


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, **more})  # type: ignore[arg-type]


def run(engine: Engine, name: str, prompt: list[int], n: int = 1) -> tuple[list[int], RequestDone]:
    """The tokens of its first choice."""
    engine.add(EngineRequest(name, prompt, greedy(), n=n, salt=SALT))
    return finish(engine, name)


def finish(engine: Engine, name: str) -> tuple[list[int], RequestDone]:
    tokens, done = [], []
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        tokens += [one.token_id for one in output.tokens if (one.request_id, one.choice) == (name, 0)]
        done += [one for one in output.done if one.request_id == name]
    assert engine.stats().blocks_held == 0
    (one,) = done
    return tokens, one


def failed(done: RequestDone) -> bool:
    return isinstance(done.error, EngineRequestError)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", [1, 4])
def test_blocks_that_a_failed_request_computed_are_not_found(steps, n):
    """In its prompt, and among its output."""
    runner, engine, known = engine_of()
    engine.add(EngineRequest("bad", PROMPT, greedy(), n=n, salt=SALT))
    for _ in range(steps):
        engine.step()
    runner.hurt(engine.block_ids("bad")[1])
    assert failed(finish(engine, "bad")[1])
    assert not any(known.values())
    tokens, done = run(engine, "after", PROMPT + continuation(PROMPT, 3))
    assert (tokens, done.cached_tokens) == (continuation(PROMPT, 3 + NEW)[3:], 0)
    assert run(engine, "again", PROMPT)[1].cached_tokens == 2 * PAGE, "from here on all is well"


def test_blocks_that_a_failed_request_hit_are_not_found_again():
    """A block that went bad in the cache fails one request, not all that begin like it."""
    runner, engine, known = engine_of()
    run(engine, "first", PROMPT)
    (block,) = engine._pool.match(hash_blocks(pack_tokens(PROMPT[:PAGE]), PAGE, secret=SECRET, salt=SALT))
    runner.hurt(block)
    assert failed(run(engine, "bad", PROMPT)[1])
    assert not any(known.values())
    assert run(engine, "after", PROMPT)[0] == continuation(PROMPT, NEW)


def test_blocks_computed_from_a_bad_block_are_not_found():
    """A longer prompt was computed behind the same beginning, and given up before its first token."""
    runner, engine, known = engine_of(max_batch_tokens=PAGE)
    run(engine, "first", PROMPT[:PAGE])
    runner.hurt(engine._pool.match(hash_blocks(pack_tokens(PROMPT), PAGE, secret=SECRET, salt=SALT))[0])
    engine.add(EngineRequest("longer", PROMPT, greedy(), salt=SALT))
    assert not engine.step().tokens
    engine.abort("longer")
    assert sum(known.values()) >= 2
    assert failed(run(engine, "bad", PROMPT[: PAGE + 1])[1])
    assert not any(known.values())
    for name in ("again", "once more"):
        assert run(engine, name, PROMPT)[0] == continuation(PROMPT, NEW)


def test_a_request_that_forbids_every_token_keeps_cached_blocks():
    """What it asks for is to blame, not what was computed."""
    _, engine, _ = engine_of()
    run(engine, "first", PROMPT)
    everything = tuple(range(VOCAB))
    engine.add(EngineRequest("bad", PROMPT, greedy(min_tokens=NEW, stop_token_ids=everything), salt=SALT))
    assert failed(finish(engine, "bad")[1])
    assert run(engine, "after", PROMPT)[1].cached_tokens == 2 * PAGE


def test_blocks_of_an_exporting_request_are_forgotten_while_they_are_still_held():
    runner, engine, known = engine_of(max_batch_tokens=PAGE)
    engine.add(EngineRequest("bad", PROMPT, greedy(), salt=SALT, prefill_only=True, export=True))
    engine.step()
    runner.hurt(engine.block_ids("bad")[0])
    while not (done := engine.step().done):
        pass
    assert failed(done[0]) and not any(known.values())
    held = engine.block_ids("bad")
    assert run_beside(engine, "after", PROMPT) == continuation(PROMPT, NEW)
    assert engine.block_ids("bad") == held
    engine.abort("bad")
    engine.check_integrity()


def run_beside(engine: Engine, name: str, prompt: list[int]) -> list[int]:
    engine.add(EngineRequest(name, prompt, greedy(), salt=SALT))
    tokens = []
    while engine.has_work:
        tokens += [one.token_id for one in engine.step().tokens]
        engine.check_integrity()
    return tokens


def test_blocks_of_a_hand_off_are_not_found_after_a_failure():
    runner, engine, known = engine_of()
    taken = engine.reserve(EngineRequest("bad", PROMPT, greedy(), salt=SALT), [], growth_tokens=4)
    runner.store(taken.block_ids, 0, PROMPT)
    runner.hurt(taken.block_ids[0])
    engine.commit("bad", [TokenOutput("bad", 0, len(PROMPT), 3)])
    assert any(known.values())
    assert failed(finish(engine, "bad")[1])
    assert not any(known.values())


@pytest.mark.parametrize("backend", ["sdpa", "cpu"])
def test_a_model_recovers_from_a_block_that_is_not_a_number(backend, checkpoint):
    model, prompt = checkpoint("llama"), prompt_ids(50, seed=4)
    engine = make_engine(model, blocks=40, attention_backend=backend)
    engine.add(EngineRequest("bad", prompt, greedy()))
    engine.step()
    runner: Any = engine._runner
    runner.kv_cache[engine.block_ids("bad")[1], 0] = math.nan
    assert failed(finish(engine, "bad")[1])
    engine.add(EngineRequest("after", prompt, greedy()))
    assert_greedy("after a block that was no number", model, prompt, finish(engine, "after")[0])


@pytest.mark.parametrize("pooling", [Pooling.LAST_TOKEN, Pooling.MEAN])
def test_an_embedding_that_is_not_finite_leaves_nothing_of_its_prompt_in_the_cache(pooling, checkpoint):
    """Without this, the next one with the same beginning would fail as well, and the one after it."""
    prompt = prompt_ids(50, seed=4)
    engine = make_engine(checkpoint("llama"), blocks=40, max_batch_tokens=32)
    runner: Any = engine._runner

    def embed(name: str) -> tuple[list[Any], RequestDone]:
        engine.add(
            EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling))
        )
        outputs = []
        while engine.has_work:
            outputs.append(engine.step())
        return [one for output in outputs for one in output.prompts], outputs[-1].done[0]

    (first,), _ = embed("first")
    block = engine._pool.match(hash_blocks(pack_tokens(prompt[:16]), 16, secret=b"test", salt=SALT))[0]
    runner.kv_cache[block, 0] = math.nan
    if pooling is Pooling.MEAN:  # takes no cached prefix: the block goes bad between its own chunks
        engine._pool.invalidate([block])
        engine.add(EngineRequest("bad", prompt, SamplingParams(max_tokens=1, pooling=pooling)))
        engine.step()
        runner.kv_cache[engine.block_ids("bad")[0], 0] = math.nan
        assert failed(finish(engine, "bad")[1])
    else:
        assert failed(embed("bad")[1])
    assert not engine._pool.chains()
    (again,), done = embed("again")
    assert done.error is None and again.vector == first.vector


def test_log_probabilities_of_a_prompt_that_are_not_finite_leave_nothing_of_it_in_the_cache(checkpoint):
    model, prompt = checkpoint("llama"), prompt_ids(50, seed=4)
    engine = make_engine(model, blocks=40, max_batch_tokens=32)
    engine.add(EngineRequest("bad", prompt, greedy(prompt_logprobs=True)))
    engine.step()
    assert engine._pool.chains()
    runner: Any = engine._runner
    runner.kv_cache[engine.block_ids("bad")[0], 0] = math.nan
    assert failed(finish(engine, "bad")[1])
    assert not engine._pool.chains()
    engine.add(EngineRequest("after", prompt, greedy()))
    assert_greedy("after a block that was no number", model, prompt, finish(engine, "after")[0])


# --- the pool -----------------------------------------------------------------------------------------------


def test_forgotten_blocks_stay_their_holders_and_are_taken_first():
    pool = BlockPool(8)
    blocks = pool.allocate(4)
    for block, name, parent in zip(blocks, b"abcd", (None, b"a", b"b", b"c"), strict=True):
        pool.register(block, bytes([name]), parent)
    pool.free(blocks[2:])
    pool.free(pool.allocate(4))  # the others are free, and hold nothing
    pool.invalidate(blocks[1:2])
    assert pool.match([b"a", b"b", b"c", b"d"]) == blocks[:1]
    assert pool.chains() == [[b"a"]]
    assert set(pool.allocate(2)) == set(blocks[2:]), "they hold nothing: the next ones to be taken"
    pool.check_integrity(dict.fromkeys(blocks, 1))
