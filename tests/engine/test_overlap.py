"""Steps launched before the last one's tokens are read: streams, ends, reports and blocks are those of steps in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.engine import Engine, overlaps
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from engine.sampling.row import Row
from tests.engine.fake_model import FakeRunner, continuation, greedy
from tests.engine.ranks import KV_BYTES, engine_of, run
from tests.engine.served import CPU, serve
from tests.harness.checkpoints import prompt_ids


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_streams_are_the_same(seed, device):
    """Stop tokens, limits, choices, logprobs; requests come at any time."""
    plain, runner, _ = serve("off", seed, device=device)
    ahead, following, _ = serve("on", seed, device=device)
    assert ahead.tokens == plain.tokens and ahead.errors == plain.errors
    assert ahead.chains == plain.chains
    assert runner.ahead == 0 and following.ahead > 10


@pytest.mark.parametrize("seed", range(4))
def test_streams_are_the_same_where_blocks_are_short(seed):
    """Sequences are preempted and computed again."""
    plain, _, _ = serve("off", seed, blocks=18, max_batch_tokens=16)
    ahead, following, _ = serve("on", seed, blocks=18, max_batch_tokens=16)
    assert ahead.streams() == plain.streams() and following.ahead > 0


@pytest.mark.parametrize("seed", range(4))
def test_streams_are_beginnings_where_requests_are_aborted(seed):
    whole, _, _ = serve("off", seed)
    some, following, _ = serve("on", seed, aborted=True)
    assert following.ahead > 10 and len(some.tokens) > 5
    for key, stream in some.streams().items():
        assert stream == whole.streams()[key][: len(stream)]


def two_running(**settings: Any) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(40, overlap="on", **settings)
    engine = Engine(runner, runner.config, secret=b"o")
    engine.add(EngineRequest("long", [5] * 6, greedy(30)))
    engine.add(EngineRequest("short", [4] * 6, greedy(3)))
    return engine, runner


def test_a_step_is_launched_before_the_last_one_is_collected():
    engine, runner = two_running()
    engine.step()  # the prompts
    assert runner.ahead == 0
    output = engine.step()
    assert runner.ahead == 1 and len(output.tokens) == 2
    assert engine._flight is not None and {item.request_id for item in engine.step_items} == {"long", "short"}


def test_blocks_that_a_step_still_writes_are_not_given_away():
    """The end is noticed when the next step is under way already."""
    engine, _ = two_running()
    engine.step()
    engine.step()
    blocks = list(engine._scheduler.requests["short"][0].blocks)
    assert [done.request_id for done in engine.step().done] == ["short"]
    flight = engine._flight
    assert flight is not None and len(flight.held) == 1
    (written,) = flight.held
    assert written == flight.plan.items[1].block_ids[flight.plan.items[1].begin // 4]
    assert written not in engine._pool._free and all(
        block in engine._pool._free for block in blocks if block != written
    )
    engine.step()
    assert written in engine._pool._free and not flight.held


def test_all_blocks_that_a_chunk_writes_are_held():
    """A step behind another one computes a chunk where its sequence was paused meanwhile."""
    engine, _ = two_running(max_batch_tokens=16)
    engine.step()
    engine.add(EngineRequest("prompt", [3] * 40, greedy(3)))
    engine.step()
    engine.pause("prompt")
    engine.step()
    engine.resume("prompt")
    engine.step()
    flight = engine._flight
    assert flight is not None
    (item,) = (one for one in flight.plan.items if one.request_id == "prompt")
    written = item.block_ids[item.begin // 4 : -(-(item.begin + len(item.token_ids)) // 4)]
    assert len(written) > 2
    engine.abort("prompt")
    assert set(written) <= set(flight.held)
    engine.check_integrity()
    while engine.has_work:
        engine.step()
    assert engine.stats().blocks_held == 0


def test_blocks_of_an_aborted_request_are_free_after_its_step():
    engine, _ = two_running()
    engine.step()
    engine.step()
    engine.abort("long")
    flight = engine._flight
    assert flight is not None and len(flight.held) == 1
    engine.check_integrity()
    output = engine.step()
    assert {token.request_id for token in output.tokens} == {"short"}
    while engine.has_work:
        engine.step()
    assert engine.stats().blocks_held == 0


def test_nothing_is_held_when_the_last_request_has_left():
    """By an abort, in the next step; by its end, at once."""
    engine, runner = two_running()
    engine.step()
    engine.step()
    engine.abort("long")
    engine.abort("short")
    assert engine.has_work and engine.stats().blocks_held == 2
    assert engine.step().tokens == []
    assert not engine.has_work and engine.stats().blocks_held == 0
    engine.add(EngineRequest("other", [4] * 6, greedy(3)))
    while not engine.step().done:
        pass
    assert runner.ahead == 3
    assert not engine.has_work and engine.stats().blocks_held == 0


def test_a_step_under_way_is_collected_though_nothing_else_can_run():
    engine, _ = two_running()
    engine.step()
    engine.step()
    engine.pause("long")
    engine.pause("short")
    assert engine.has_work
    assert len(engine.step().tokens) == 2 and not engine.has_work


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ((5, 6),)},
    ],
)
def test_penalties_and_words_wait_for_the_tokens(sampling):
    runner = FakeRunner(40, overlap="on")
    engine = Engine(runner, runner.config, secret=b"o")
    engine.add(EngineRequest("one", [5] * 6, greedy(12, **sampling)))
    while engine.has_work:
        engine.step()
    assert runner.ahead == 0 and engine.stats().output_tokens == 12


def test_a_waiting_request_is_not_passed_by():
    """A step that may admit it is planned with what the last one left."""
    engine, runner = two_running(max_batch_requests=2)
    engine.step()
    engine.add(EngineRequest("waits", [3] * 6, greedy(3)))
    engine.step()
    assert runner.ahead == 0


def draw_again(engine: Engine, again: Callable[[int, list[Row]], int | None]) -> None:
    """`again(calls, rows)` names a row of a draw whose token is another on the device."""
    real, calls = engine._outputs._sampler.begin, 0

    def begin(logits: Any, source: Any, rows: Any) -> Any:
        nonlocal calls
        calls += 1
        draw = real(logits, source, rows)
        row = again(calls, rows)
        if row is None:
            return draw
        wrong = draw.token_ids
        wrong[row] = (wrong[row] + 1) % 97

        class Redrawn:
            redrawn, unsound, token_ids = {row}, set[int](), wrong

            def results(self) -> Any:
                return draw.results()

        return Redrawn()

    engine._outputs._sampler.begin = begin  # type: ignore[method-assign]


def test_a_token_that_is_drawn_again_takes_its_step_back():
    """The device went on with the wrong one: what that step computed of the sequence is dropped."""
    runner = FakeRunner(40, overlap="on")
    engine = Engine(runner, runner.config, secret=b"o")
    prompt = [5] * 6
    engine.add(EngineRequest("one", prompt, greedy(20)))
    engine.add(EngineRequest("two", [4] * 6, greedy(20)))
    draw_again(engine, lambda calls, rows: None if calls % 3 else 0)
    got: dict[str, list[int]] = {"one": [], "two": []}
    while engine.has_work:
        for token in engine.step().tokens:
            got[token.request_id].append(token.token_id)
        engine.check_integrity()
    assert got == {"one": continuation(prompt, 20), "two": continuation([4] * 6, 20)}
    assert runner.ahead > 10


def test_a_request_whose_every_token_is_drawn_again_goes_on_beside_others():
    """A dropped step has drawn a token too, which the next step has not taken."""
    engine, runner = two_running()  # "short" ends after 3 tokens
    engine.add(EngineRequest("again", [6] * 6, greedy(20)))
    draw_again(engine, lambda _, rows: next((i for i, row in enumerate(rows) if row.tokens[0] == 6), None))
    got: dict[str, list[int]] = {"long": [], "short": [], "again": []}
    while len(got["again"]) < 10 or len(got["long"]) < 10:
        for token in engine.step().tokens:
            got[token.request_id].append(token.token_id)
        engine.check_integrity()
    assert got["again"] == continuation([6] * 6, len(got["again"])) and runner.ahead > 10
    assert len(got["long"]) <= 2 * len(got["again"]) + 2  # every second step of it is dropped


def test_a_row_that_fails_ends_its_request_though_the_next_step_has_begun():
    engine, runner = two_running()
    engine.step()
    runner.sick.add("long")
    output = engine.step()  # launches two steps; in both the logits of "long" are no numbers
    assert runner.ahead == 1
    assert [(one.request_id, one.error is not None) for one in output.done] == [("long", True)]
    got = [token.token_id for token in output.tokens]
    while engine.has_work:
        got += [token.token_id for token in engine.step().tokens]
    assert got == continuation([4] * 6, 3)[1:]
    assert engine.stats().blocks_held == 0


@pytest.mark.parametrize("backend", ["sdpa", "cpu"])
def test_a_model_says_the_same(backend, checkpoint):
    answers = []
    for overlap in ("off", "on"):
        config = EngineConfig(
            model=checkpoint("qwen3"),
            dtype="float32",
            kv_memory_bytes=KV_BYTES,
            attention_backend=backend,
            overlap=overlap,
        )
        runner = ModelRunner(load_model(config))
        requests = [
            EngineRequest(
                str(i),
                prompt_ids(9 + 8 * i, seed=i),
                SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=6 + 7 * i, ignore_eos=True),
                n=1 + i % 2,
            )
            for i in range(5)
        ]
        answers.append(run(engine_of(runner), *requests))
    assert answers[0] == answers[1]


def test_steps_overlap_on_a_card_and_on_one_rank():
    cuda = torch.device("cuda")
    assert overlaps("auto", cuda, 1) and not overlaps("auto", CPU, 1) and not overlaps("auto", cuda, 2)
    assert overlaps("on", CPU, 1) and not overlaps("off", cuda, 1) and not overlaps("on", cuda, 2)
