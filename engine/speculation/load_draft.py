"""Loads the draft model: on the leader alone, and before the leader's share of the model, whose KV pool gets what is left
beside the draft model's weights, its own pool and its recorded steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError, ModelError
from cluster.protocol.draft_model import check_draft_model
from engine import build
from engine.model import preflight, rotary
from engine.model.config import ModelConfig
from engine.runner import ModelRunner
from engine.speculation.draft_model import CATCH_UP_TOKENS
from engine.speculation.drafts import MAX_ROWS
from engine.warm_up import Tell, say

# The default size of the pool, in requests and tokens of each: no more requests than this get drafts in a step.
POOL_REQUESTS, POOL_TOKENS = MAX_ROWS // 2, 4096
# The target's settings that the draft model's runner has too.
KEPT = ("dtype", "quantization", "device", "page_size", "cuda_graphs", "warm_up_seconds", "threads")


def settings(config: EngineConfig) -> EngineConfig:
    """Settings of the draft model's runner, resolved. `config`: the target's, which names a draft model. Drafts end where
    the draft model's context or its whole pool does.

    Raises ConfigError.
    """
    assert config.draft_model is not None, "the caller has checked it"
    target = ModelConfig.read(config.model)
    check_draft_model(config.model, config.draft_model)
    given = {name: getattr(config, name) for name in KEPT}
    given |= {
        "model": config.draft_model,
        "max_batch_tokens": CATCH_UP_TOKENS,
        "max_batch_requests": MAX_ROWS,
    }
    with _named(config.draft_model):
        model = ModelConfig.read(config.draft_model)
        if config.quantization != "int8" and preflight.why_not_rounded(model):
            given["quantization"] = "auto"  # drafts change no tokens
        rotary.check_angles(model)
        resolved = build.resolve(EngineConfig.model_validate(given), model)
    if model.vocab_size > target.vocab_size:
        raise ConfigError(
            f"--draft-model {config.draft_model} has a vocabulary of {model.vocab_size} tokens, more than the model's "
            f"{target.vocab_size}: a draft model needs the same tokenizer",
            field="draft_model",
        )
    context = min(config.max_model_len or target.max_model_len, model.max_model_len)
    size = build.block_bytes(model, resolved)
    default = max(MAX_ROWS, POOL_REQUESTS * -(-min(context, POOL_TOKENS) // config.page_size))
    blocks = config.draft_kv_memory_bytes // size if config.draft_kv_memory_bytes else default
    # A step of the draft model has up to so many single tokens, and no more than the pool has blocks.
    if blocks < MAX_ROWS:
        raise ConfigError(
            f"--draft-kv-memory: {config.draft_kv_memory_bytes} bytes hold {blocks} blocks of {config.page_size} tokens, "
            f"{MAX_ROWS} are needed, which take {MAX_ROWS * size} bytes",
            field="draft_kv_memory",
        )
    context = min(context, blocks * config.page_size)
    return resolved.model_copy(update={"max_model_len": context, "kv_memory_bytes": blocks * size})


def load(config: EngineConfig, tell: Tell = say) -> ModelRunner:
    """Load and warm up. Raises ConfigError, ModelError or SetupError."""
    own = settings(config)

    def tell_of_draft(what: str) -> None:
        tell(f"draft model: {what}")

    with _named(own.model):
        runner = ModelRunner(build.load_model(own, tell=tell_of_draft))
    runner.warm_up(tell_of_draft)
    return runner


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Let errors of the draft model name its flag and directory."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        field = "draft_kv_memory" if error.field == "kv_memory" else "draft_model"
        message = error.message.replace("kv_memory", "draft_kv_memory")
        raise ConfigError(f"--draft-model {directory}: {message}", field=field) from error
