"""The start of a rank, in stages: all that it compiles, loads and records before its first request.

    load_model    probe of the attention kernels ─► weights ─► kernels are compiled ─► largest step, KV pool
    ModelRunner   buffers of the first steps ─► a recording per size of a decode step ─► draws

The stages of each are run on a thread of their own, so that a compiler that hangs ends the start with an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import BatonError, SetupError
from cluster.protocol.kv_format import INT8
from engine.plan import PlanItem, StepPlan
from engine.request import SamplingParams
from engine.sampling.grammar.base import all_allowed
from engine.sampling.registry import sampler_for
from engine.sampling.row import Row

log = logging.getLogger(__name__)
LONG_PROMPT = 128  # at least as long as the tiles of any kernel
Tell = Callable[[str], None]  # takes what is being done now, for logs and probes


@dataclass(frozen=True)
class Stage:
    name: str  # "the kernels of prompts"
    run: Callable[[], object]


def say(what: str) -> None:
    """The `Tell` of a rank that answers no probes."""
    log.info("%s", what)


def first_steps(config: EngineConfig, rows: int) -> list[tuple[str, StepPlan]]:
    """Steps that together use every kernel, all of them in the first block of a KV cache; `config` is resolved.

    Which kernels are used follows from the kinds of items in a step, and on CPUs from whether a prompt is long. `rows`: of
    the step buffers, the most items of a step.
    """
    most = min(config.max_model_len - 1, config.max_batch_tokens)
    wanted = {2, 2 * config.page_size, LONG_PROMPT}
    # Products with quantised weights have tiles of 16, 64 and 128 rows.
    if config.attention_backend == "triton":
        wanted |= {17, 65, LONG_PROMPT + 1}
    lengths = [one for one in sorted(wanted) if one <= most] or [max(1, most)]
    plans = [
        (f"the kernels of prompts of {length} tokens", _step([(0, length)], config)) for length in lengths
    ]
    token = (lengths[0], lengths[0] + 1)
    if rows > 1 and config.max_batch_tokens > 2 and 2 in lengths:
        plans.append(("the kernels of prompts beside tokens", _step([(0, 2), token], config)))
    if config.kv_dtype == INT8 and 2 in lengths:  # what is cached of a prompt is dequantised first
        plans.append(("the kernels of prompts behind cached tokens", _step([(1, 3)], config)))
    return [*plans, ("the kernels of single tokens", _step([token], config))]


def _step(spans: list[tuple[int, int]], config: EngineConfig) -> StepPlan:
    """`spans`: first and last position of each item."""
    return StepPlan(
        [
            PlanItem("warm-up", [0] * (end - begin), begin, [0] * -(-end // config.page_size), row, 1)
            for row, (begin, end) in enumerate(spans)
        ],
        [],
    )


def first_draws(logits: Tensor) -> None:
    """Draw from fp32 [1, vocab] in every way that a request may ask for."""
    sampler = sampler_for(logits.device)
    vocab = logits.shape[1]
    changed = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
    )
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=1.0, top_p=0.9),  # of equal logits: most of the vocabulary
        SamplingParams(temperature=1.0, logprobs=True, top_logprobs=min(2, vocab)),
        changed,
    ):
        mask = all_allowed(vocab) if params is changed else None
        row = Row(params, 0, [0, 0], 1, (vocab - 1,) if vocab > 1 else (), mask)
        sampler.begin(logits, [0], [row]).results()


def run(task: str, stages: Sequence[Stage], seconds: float, tell: Tell, device: torch.device) -> None:
    """Run the stages in their order; `tell` gets, for each, "`task`: 3 of 12, the stage's name".

    Raises SetupError if they take longer than `seconds`; their thread is then left where it is, for the process to end.
    """
    began = time.monotonic()
    progress = _Progress(task, len(stages))
    if not stages:
        return
    thread = threading.Thread(
        target=_run_all, args=(stages, progress, tell, current_card(device)), name="warm-up", daemon=True
    )
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise SetupError(
            f"warm_up_seconds: {progress} has not ended after {seconds:.0f} s ({progress.stage_seconds():.0f} s of them "
            f"in this stage): allow more, keep what is compiled between starts (TRITON_CACHE_DIR, NUMBA_CACHE_DIR), or "
            f"record fewer decode steps (cuda_graphs, max_batch_requests)",
            field="warm_up_seconds",
        )
    if progress.failure is not None:
        raise progress.failure
    log.info("%s: %d stages in %.1f s", task, len(stages), time.monotonic() - began)


def current_card(device: torch.device) -> torch.device | None:
    """The card that another thread has to select to compute as this one does; a new thread's is the node's first."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


class _Progress:
    """Written by the thread of the stages, read by the one that waits for it."""

    def __init__(self, task: str, total: int):
        self.failure: BaseException | None = None
        self._task = task
        self._total = total
        self._text = task
        self._at = time.monotonic()

    def __str__(self) -> str:
        return self._text

    def begin(self, number: int, name: str) -> None:
        self._text, self._at = f"{self._task}: {number} of {self._total}, {name}", time.monotonic()

    def stage_seconds(self) -> float:
        return time.monotonic() - self._at


def _run_all(stages: Sequence[Stage], progress: _Progress, tell: Tell, card: torch.device | None) -> None:
    try:
        if card is not None:
            torch.cuda.set_device(card)
        for number, stage in enumerate(stages, 1):
            progress.begin(number, stage.name)
            tell(str(progress))
            stage.run()
    except BatonError as error:
        progress.failure = error
    except Exception as error:
        progress.failure = error
        log.error("%s has failed: %s: %s", progress, type(error).__name__, error)
