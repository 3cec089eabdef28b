"""A rank compiles before its first request, says how far it is, and gives up where that takes too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ModelError, SetupError
from engine import warm_up
from engine.build import load_model
from engine.plan import StepPlan
from engine.runner import ModelRunner
from engine.warm_up import Stage
from tests.gpu.models import write

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def test_each_stage_is_named_before_it_runs():
    said: list[str] = []
    stages = [Stage("of prompts", lambda: said.append("ran")), Stage("of tokens", lambda: None)]
    warm_up.run("kernels are compiled", stages, 60.0, said.append, CPU)
    assert said == [
        "kernels are compiled: 1 of 2, of prompts",
        "ran",
        "kernels are compiled: 2 of 2, of tokens",
    ]


def test_a_compiler_that_hangs_ends_the_start_with_what_to_do():
    over = threading.Event()
    stages = [Stage("quick", lambda: None), Stage("of prompts", over.wait)]
    with pytest.raises(SetupError, match=r"kernels are compiled: 2 of 2, of prompts has not ended") as caught:
        warm_up.run("kernels are compiled", stages, 0.05, lambda what: None, CPU)
    over.set()
    assert caught.value.field == "warm_up_seconds"
    for remedy in ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "cuda_graphs"):
        assert remedy in caught.value.message


@pytest.mark.parametrize("error", [ModelError("a key", field="x"), RuntimeError("no C compiler")])
def test_a_stage_that_fails_raises_what_it_raised(error, caplog):
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        warm_up.run("kernels are compiled", [Stage("of prompts", fail)], 60.0, lambda what: None, CPU)
    assert caught.value is error
    assert ("1 of 1, of prompts has failed" in caplog.text) is isinstance(error, RuntimeError)


@pytest.mark.parametrize(("name", "card"), [("cuda:1", 1), ("cuda", 2)])
def test_the_thread_of_the_stages_computes_on_the_same_card(name, card, monkeypatch):
    """A new thread's current card is the node's first one."""
    selected: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda one: selected.append((threading.current_thread().name, one))
    )
    warm_up.run("task", [Stage("one", lambda: None)], 60.0, lambda what: None, torch.device(name))
    assert selected == [("warm-up", torch.device("cuda", card))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write(tmp_path_factory.mktemp("llama"), "llama")


def config_of(model: Path, **settings: object) -> EngineConfig:
    return EngineConfig(model=model, device="cpu", kv_memory_bytes=8 << 20, max_model_len=256, **settings)  # type: ignore[arg-type]


def measured(model: Path, **settings: object) -> EngineConfig:
    """With a pool whose size is not given, and follows from the largest step."""
    config = config_of(model, max_batch_tokens=64, max_batch_requests=4, memory_bytes=2 << 30, **settings)
    return config.model_copy(update={"kv_memory_bytes": 0})


def test_a_start_says_what_it_does(model):
    said: list[str] = []
    ModelRunner(load_model(measured(model), tell=said.append)).warm_up(said.append)
    tasks = list(dict.fromkeys(one.split(":")[0] for one in said))
    assert tasks[0].startswith("weights take ")
    assert tasks[1:] == [
        "weights are read",
        "kernels are compiled",
        "the largest step is measured",
        "the model is warmed up",
    ]
    assert said[-1].endswith("draws") and any("prompts of 32 tokens" in one for one in said)


def test_a_model_that_cannot_be_compiled_in_time_is_refused(model, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr("engine.largest_step.run", lambda *arguments: over.wait())
    with pytest.raises(SetupError, match="kernels are compiled: 1 of"):
        load_model(measured(model, warm_up_seconds=0.05))
    over.set()


@pytest.mark.parametrize(
    "limits",
    [{"max_batch_tokens": 1}, {"max_batch_tokens": 2}, {"max_batch_tokens": 40, "page_size": 64}],
    ids=str,
)
def test_small_limits_are_kept(limits, model, monkeypatch):
    runner = ModelRunner(load_model(config_of(model, **limits)))
    execute, tokens = runner.execute, list[int]()

    def counted(plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        tokens.append(sum(len(item.token_ids) for item in plan.items))
        return execute(plan, drawn)

    monkeypatch.setattr(runner, "execute", counted)
    runner.warm_up()
    assert 0 < max(tokens) <= limits["max_batch_tokens"]


def test_a_pool_of_one_block_is_enough(model):
    config = config_of(model, page_size=256).model_copy(update={"kv_memory_bytes": 300 << 10})
    runner = ModelRunner(load_model(config))
    assert runner.num_blocks == 1
    runner.warm_up()


def start(model: Path, dtype: str, kv_dtype: str, cache: Path) -> dict[str, object]:
    """What numba compiled in the start of a new process, and in the requests after it."""
    command = [sys.executable, "-m", "tests.engine.ops.cpu.compiled_by_requests", str(model), dtype, kv_dtype]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    print(dtype, kv_dtype, found)
    return found


@pytest.mark.system
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "auto"), ("bfloat16", "int8")])
def test_requests_compile_nothing_and_a_second_start_neither(dtype, kv_dtype, model, tmp_path):
    """The pool's size is given, so that no largest step has run."""
    pytest.importorskip("numba")
    first, second = (start(model, dtype, kv_dtype, tmp_path) for _ in range(2))
    assert first["by_requests"] == second["by_requests"] == []
    assert first["compiled"] > 20 and second["compiled"] == 0  # type: ignore[operator]
    assert second["seconds"] < first["seconds"] / 2  # type: ignore[operator]
