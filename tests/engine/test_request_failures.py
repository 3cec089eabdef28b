"""A failure in the engine's work for one request ends that request with a typed error; the engine goes on, the tokens of
the others are unchanged, and every block is freed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import errors
from cluster.errors import BatonError, BlocksExhaustedError, EngineRequestError, InvalidRequestError
from engine import next_tokens as next_tokens_module
from engine.engine import Engine
from engine.output import OutputProcessor
from engine.plan import StepPlan
from engine.request import EngineRequest, FinishReason, RequestDone, SamplingParams, TokenOutput
from engine.sampling import sampler as sampler_module
from engine.sampling.adjust import Adjustments
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.scheduler import Scheduler
from tests.engine.fake_model import VOCAB, FakeRunner, continuation
from tests.engine.ranks import engine_of, runners
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import assert_greedy

SECRET, SALT = b"p", bytes(16)
NEW = 12
BAD, GOOD = [9] * 6, {"one": [3, 4, 5, 6, 7], "two": [8] * 11}


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, **more})  # type: ignore[arg-type]


class SickRunner(FakeRunner):
    """Puts `value` into the `at`-th logits of the request "bad", counted over all choices."""

    def __init__(self, value: float, at: int, **settings: Any):
        super().__init__(64, **settings)
        self.value, self.at, self.seen = value, at, 0

    def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().execute(plan, drawn)
        wanting = [item for item in plan.items if item.num_logits]
        for row, item in enumerate(wanting):
            if item.request_id == "bad":
                self.seen += 1
                if self.seen == self.at:
                    logits[row, 50] = self.value
        return logits


def run(engine: Engine) -> tuple[dict[tuple[str, int], list[int]], dict[str, RequestDone]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    done: dict[str, RequestDone] = {}
    for _ in range(500):
        if not engine.has_work:
            break
        step = engine.step()
        engine.check_integrity()
        for token in step.tokens:
            tokens.setdefault((token.request_id, token.choice), []).append(token.token_id)
        for one in step.done:
            assert one.request_id not in done, "a request ends once"
            done[one.request_id] = one
    assert not engine.has_work
    return tokens, done


def assert_only_bad_failed(
    engine: Engine, tokens: dict[tuple[str, int], list[int]], done: dict[str, RequestDone]
) -> None:
    assert set(done) == {"bad", *GOOD}
    assert isinstance(done["bad"].error, EngineRequestError)
    for name, prompt in GOOD.items():
        assert done[name].error is None
        assert tokens[name, 0] == continuation(prompt, NEW)
    assert engine.stats().blocks_held == 0
    assert not engine.abort("bad"), "nothing of it is left"


def with_good(engine: Engine, bad: EngineRequest) -> None:
    first, second = (EngineRequest(name, prompt, greedy(), salt=SALT) for name, prompt in GOOD.items())
    engine.add(first)
    engine.add(bad)
    engine.add(second)


@pytest.mark.parametrize("value", [math.nan, math.inf])
# The request's own first tokens; then those of each choice
@pytest.mark.parametrize(("n", "at"), [(1, 1), (1, 5), (3, 1), (3, 2), (3, 3), (3, 4), (3, 8)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": True}])
def test_logits_that_are_not_finite_end_their_request(value, n, at, sampling):
    runner = SickRunner(value, at)
    engine = Engine(runner, runner.config, secret=SECRET)
    with_good(engine, EngineRequest("bad", BAD, greedy(**sampling), n=n, salt=SALT))
    tokens, done = run(engine)
    assert runner.seen >= at
    assert_only_bad_failed(engine, tokens, done)
    assert done["bad"].error is not None and "finite" in done["bad"].error.message


def test_a_request_that_forbids_every_token_fails_as_invalid(caplog):
    runner = FakeRunner(64)
    engine = Engine(runner, runner.config, secret=SECRET)
    everything = greedy(ignore_eos=False, min_tokens=4, stop_token_ids=tuple(range(VOCAB)))
    with_good(engine, EngineRequest("bad", BAD, everything, salt=SALT))
    tokens, done = run(engine)
    assert_only_bad_failed(engine, tokens, done)
    assert done["bad"].error is not None and done["bad"].error.field == "min_tokens"
    assert [record.levelname for record in caplog.records if "bad" in record.message] == ["WARNING"]


def test_logits_that_are_not_finite_are_logged_as_an_error(caplog):
    runner = SickRunner(math.nan, 2)
    engine = Engine(runner, runner.config, secret=SECRET)
    forbids_one = greedy(ignore_eos=False, min_tokens=4, stop_token_ids=(VOCAB - 1,))
    with_good(engine, EngineRequest("bad", BAD, forbids_one, salt=SALT))
    run(engine)
    assert [record.levelname for record in caplog.records if "bad" in record.message] == ["ERROR"]


def fails_for_bad(real: Callable[..., object], name_of: Callable[..., str], at: int) -> Callable[..., object]:
    seen = 0

    def sometimes(*arguments: object) -> object:
        nonlocal seen
        if name_of(*arguments) == "bad":
            seen += 1
            if seen >= at:
                raise ZeroDivisionError("of this request")
        return real(*arguments)

    return sometimes


# Where the engine works for one request: (module, function, which request its arguments are of)
WORK: list[tuple[object, str, Callable[..., str]]] = [
    (OutputProcessor, "_advance", lambda _, sequence, *__: sequence.request.request_id),
    (PrefixCache, "register", lambda _, sequence, __: sequence.request.request_id),
    (OutputProcessor, "append_tokens", lambda _, sequence, __: sequence.request.request_id),
    (OutputProcessor, "_accept", lambda _, sequence, *__: sequence.request.request_id),
    (next_tokens_module, "_rows", lambda one, *_: one.sequence.request.request_id),
    (next_tokens_module, "_output", lambda sequence, *_: sequence.request.request_id),
    (Adjustments, "add", lambda _, __, row: "bad" if row.params.min_tokens else "good"),
    # Of all rows of a step that need it, here the bad ones: then each is drawn alone, and fails again.
    (sampler_module, "_logprobs", lambda logits: "bad"),
    (sampler_module, "draw", lambda *_: "bad"),
]


@pytest.mark.parametrize("at", [1, 2, 6])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("module", "function", "name_of"), WORK, ids=[name for _, name, _ in WORK])
def test_an_exception_in_its_own_work_ends_the_request(module, function, name_of, n, at, monkeypatch):
    monkeypatch.setattr(module, function, fails_for_bad(getattr(module, function), name_of, at))
    runner = FakeRunner(64)
    engine = Engine(runner, runner.config, secret=SECRET)
    sampling = greedy(temperature=1.0, min_tokens=NEW, logprobs=True, ignore_eos=False)
    with_good(engine, EngineRequest("bad", BAD, sampling, n=n, salt=SALT))
    tokens, done = run(engine)
    assert_only_bad_failed(engine, tokens, done)
    error = done["bad"].error
    assert error is not None and isinstance(error.__cause__, ZeroDivisionError)


def test_a_failed_request_that_exports_keeps_its_blocks_until_it_is_aborted():
    """Its hand-off may still be reading them."""
    runner = SickRunner(math.nan, 1)
    engine = Engine(runner, runner.config, secret=SECRET)
    engine.add(EngineRequest("bad", BAD, greedy(), salt=SALT, prefill_only=True, export=True))
    _, done = run(engine)
    assert isinstance(done["bad"].error, EngineRequestError)
    assert engine.stats().blocks_held == len(engine.block_ids("bad")) == 2
    assert engine.abort("bad")
    engine.check_integrity()
    assert engine.stats().blocks_held == 0


def test_a_failure_of_the_forward_pass_is_no_single_requests():
    class Broken(FakeRunner):
        def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
            raise RuntimeError("a rank has died")

    runner = Broken(8)
    engine = Engine(runner, runner.config, secret=SECRET)
    engine.add(EngineRequest("one", [3], greedy(), salt=SALT))
    with pytest.raises(RuntimeError, match="a rank has died"):
        engine.step()


def reserved(n: int = 1) -> tuple[Engine, list[int], list[TokenOutput]]:
    runner = FakeRunner(64)
    engine = Engine(runner, runner.config, secret=SECRET)
    taken = engine.reserve(EngineRequest("bad", BAD, greedy(), n=n, salt=SALT), [], growth_tokens=4)
    runner.store(taken.block_ids, 0, BAD)
    return engine, taken.block_ids, [TokenOutput("bad", choice, len(BAD), 3 + choice) for choice in range(n)]


@pytest.mark.parametrize(
    ("owner", "function"),
    [(PrefixCache, "register"), (OutputProcessor, "append_tokens"), (Scheduler, "finish")],
    ids=["register", "append_tokens", "finish"],
)
def test_a_commit_that_fails_frees_everything(owner, function, monkeypatch):
    """Before anything is done, between two choices, and after the last one."""
    engine, _, tokens = reserved(n=3)
    tokens[1] = dataclasses.replace(tokens[1], finish=FinishReason.STOP)  # `finish` is called for it
    real = getattr(owner, function)
    failed = False

    def failing(self: object, sequence: object, *more: object) -> object:
        nonlocal failed
        if failed:
            return real(self, sequence, *more)
        failed = True
        if function == "append_tokens":
            real(self, sequence, *more)
        raise ZeroDivisionError("of this request")

    monkeypatch.setattr(owner, function, failing)
    with pytest.raises(EngineRequestError) as caught:
        engine.commit("bad", tokens)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats().blocks_held == 0
    with pytest.raises(BlocksExhaustedError):
        engine.commit("bad", tokens)


def test_a_commit_without_a_token_to_go_on_with_changes_nothing():
    engine, blocks, tokens = reserved(n=2)
    wrong = [
        [],
        [dataclasses.replace(tokens[0], choice=7)],
        [dataclasses.replace(token, finish=FinishReason.STOP) for token in tokens],
    ]
    for first_tokens in wrong:
        with pytest.raises(InvalidRequestError):
            engine.commit("bad", first_tokens)
        assert not engine.has_work
        assert engine.block_ids("bad") == blocks
    engine.commit("bad", tokens)
    answers, done = run(engine)
    assert answers["bad", 0] == continuation([*BAD, 3], NEW - 1)
    assert done["bad"].error is None
    assert engine.stats().blocks_held == 0


EXTREME = st.sampled_from([0.0, 1e-45, 1e-38, 1e-5, 1e-2, 1.0, 100.0, 1e6])
extreme_sampling = st.fixed_dictionaries(
    {
        "temperature": EXTREME,
        "top_k": st.sampled_from([0, 1, 2, VOCAB, 2**32 - 1]),
        "top_p": st.sampled_from([1e-45, 1e-3, 0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-45, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([1e-45, 1e-38, 1.0, 1e6]),
        "presence_penalty": st.sampled_from([-1e6, 0.0, 1e6]),
        "frequency_penalty": st.sampled_from([-1e6, 0.0, 1e6]),
        "seed": st.sampled_from([0, 1, 2**63, 2**64 - 1]),
        "min_tokens": st.sampled_from([0, 2, NEW]),
        "stop_token_ids": st.sampled_from([(), (3,), tuple(range(VOCAB - 1))]),
        "logit_bias": st.sampled_from([{}, {0: -1e6, 5: 1e6}]),
        "logprobs": st.booleans(),
        "top_logprobs": st.sampled_from([0, 1, VOCAB]),
    }
)


@settings(max_examples=150, deadline=None)
@given(sampling=extreme_sampling, n=st.integers(1, 2))
def test_any_valid_request_gets_an_answer(sampling, n):
    """Its neighbours in the batch get theirs, too."""
    runner = FakeRunner(64)
    engine = Engine(runner, runner.config, secret=SECRET)
    with_good(engine, EngineRequest("bad", BAD, greedy(ignore_eos=False, **sampling), n=n, salt=SALT))
    tokens, done = run(engine)
    assert {name: one.error for name, one in done.items()} == dict.fromkeys(["bad", *GOOD])
    assert {choice for name, choice in tokens if name == "bad"} == set(range(n))
    for name, prompt in GOOD.items():
        assert tokens[name, 0] == continuation(prompt, NEW)


def test_ranks_stay_in_step_when_a_request_fails(checkpoint, monkeypatch):
    model = checkpoint("llama")
    with runners(model, 2) as ranks:
        leader = ranks[0]
        engine = engine_of(leader)
        real, seen = leader.execute, 0

        def execute(plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal seen
            logits = real(plan, drawn).clone()
            wanting = [item.request_id for item in plan.items if item.num_logits]
            if "bad" in wanting:
                seen += 1
                if seen == 4:
                    logits[wanting.index("bad")] = math.nan
            return logits

        monkeypatch.setattr(leader, "execute", execute)
        prompts = {"one": prompt_ids(40, seed=1), "bad": prompt_ids(30, seed=2), "two": prompt_ids(9, seed=3)}
        for name, prompt in prompts.items():
            engine.add(EngineRequest(name, prompt, greedy()))
        tokens, done = run(engine)
        assert isinstance(done["bad"].error, EngineRequestError)
        engine.add(EngineRequest("after", prompts["bad"], greedy()))
        after, _ = run(engine)
    assert engine.stats().blocks_held == 0
    for name in ("one", "two"):
        assert_greedy("beside a request that fails", model, prompts[name], tokens[name, 0])
    assert_greedy("beside a request that fails", model, prompts["bad"], after["after", 0])


def test_the_error_keeps_its_class_on_the_wire():
    error = errors.from_wire(EngineRequestError("why").to_wire())
    assert type(error) is EngineRequestError
    assert isinstance(error, BatonError)
    assert (error.http_status, error.grpc_status.name, error.retryable) == (500, "INTERNAL", True)


def test_a_step_that_fails_leaves_its_requests():
    """Its requests; none if it failed while it was scheduled."""
    runner = FakeRunner(64)
    engine = Engine(runner, runner.config, secret=SECRET)
    engine.add(EngineRequest("one", GOOD["one"], greedy(max_tokens=1), salt=SALT))
    engine.step()  # it ends
    engine.add(EngineRequest("two", GOOD["two"], greedy(), salt=SALT))
    execute, runner.execute = runner.execute, None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        engine.step()
    assert [item.request_id for item in engine.step_items] == ["two"]
    runner.execute = execute  # type: ignore[method-assign]
    engine._scheduler.schedule = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        engine.step()
    assert engine.step_items == []
