"""Settings, checks and memory of a draft model, until it is loaded."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import ConfigError
from engine import build
from engine.build import load_model
from engine.speculation import load_draft, pool_bytes
from tests.engine.fake_model import FakeRunner
from tests.engine.speculation.draft_engines import DRAFT, settings_for
from tests.engine.stored_formats import GOLDEN
from worker.ranks import local

# --- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "settings", "message", "field"),
    [
        ("prefill", {"draft_model": DRAFT}, "--draft-model /draft has no effect on a prefill", "draft_model"),
        (
            "decode",
            {"draft_model": DRAFT, "speculation": "ngram"},
            "--draft-model and --speculation ngram exclude",
            "draft_model",
        ),
        ("decode", {"draft_kv_memory_bytes": 5}, "--draft-kv-memory has no effect", "draft_kv_memory"),
    ],
)
def test_settings_without_an_effect_are_refused(role, settings, message, field):
    with pytest.raises(ConfigError, match=message) as caught:
        WorkerConfig(role=role, engine={"model": "/none", **settings})
    assert caught.value.field == field


def test_it_excludes_steps_launched_ahead():
    with pytest.raises(ValidationError, match="draft_model needs them: use overlap auto or no draft_model"):
        EngineConfig(model=Path("/none"), overlap="on", draft_model=DRAFT)


def changed(model: Path, target: Path, **keys: Any) -> Path:
    target.mkdir()
    raw = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **keys}))
    return target


def test_an_unfit_draft_model_is_refused_before_weights_are_read(checkpoint, tmp_path):
    model = checkpoint("llama")
    unfit: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "none", {}, r"--draft-model .*none: no config.json there"),
        (
            changed(model, tmp_path / "vocab", vocab_size=100_000),
            {},
            "has a vocabulary of 100000 tokens, more than the .* of --model",
        ),
        (changed(model, tmp_path / "kind", architectures=["X"]), {}, r"--draft-model .*kind: "),
        (
            model,
            {"draft_kv_memory_bytes": 10},
            r"--draft-kv-memory: 10 bytes hold 0 blocks of 16 tokens, 16 are needed, which take \d+ bytes",
        ),
    ]
    for draft, more, message in unfit:
        config = WorkerConfig(role="decode", engine={"model": model, "draft_model": draft, **more})
        with pytest.raises(ConfigError, match=message) as caught:
            local.check(config)
        assert caught.value.field in ("draft_model", "draft_kv_memory")


def test_baton_up_is_told_the_size_of_the_draft_models_pool(checkpoint, monkeypatch, capsys):
    config = EngineConfig(model=checkpoint("llama"), draft_model=checkpoint("llama"), page_size=8)
    monkeypatch.setattr(sys, "stdin", io.StringIO(config.model_dump_json()))
    pool_bytes.main()
    size = int(capsys.readouterr().out)
    assert size == load_draft.settings(config).kv_memory_bytes > 0


def test_a_number_of_a_draft_models_configuration_is_refused_with_its_directory(checkpoint, tmp_path):
    draft = changed(checkpoint("llama"), tmp_path / "draft", vocab_size=-5)
    config = WorkerConfig(role="decode", engine={"model": checkpoint("llama"), "draft_model": draft})
    with pytest.raises(ConfigError, match=r"--draft-model .*draft: config.json: vocab_size is -5"):
        local.check(config)


def test_a_draft_models_configuration_that_is_nested_too_deeply_is_refused(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)
    config = WorkerConfig(role="decode", engine={"model": checkpoint("llama"), "draft_model": tmp_path})
    with pytest.raises(ConfigError, match=r"--draft-model .*config.json"):
        local.check(config)


def test_a_vocabulary_without_the_targets_padding_is_fit(checkpoint, tmp_path):
    """As those of small models of the Qwen 2.5 and Gemma 3 families are."""
    model = checkpoint("llama")
    draft = changed(model, tmp_path / "vocab", vocab_size=64)
    config = WorkerConfig(role="decode", engine={"model": model, "draft_model": draft, "device": "cpu"})
    local.check(config)


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_a_quantised_draft_model_stays_so_beside_a_rounded_target(quantization, checkpoint):
    """Drafts change no tokens."""
    model = checkpoint("llama")
    for draft, expected in ((GOLDEN / "awq", "auto"), (model, quantization)):
        config = EngineConfig(model=model, draft_model=draft, device="cpu", quantization=quantization)
        assert load_draft.settings(config).quantization == expected


def test_settings_of_the_draft_models_runner(checkpoint, tmp_path):
    """Its context is the shortest of the target's, its own, and what its pool holds."""
    model = checkpoint("llama")
    short = changed(model, tmp_path / "short", max_position_embeddings=64)
    config = EngineConfig(model=model, draft_model=short, device="cpu", page_size=8, tensor_parallel=2)
    own = load_draft.settings(config)
    assert (own.model, own.max_model_len, own.page_size, own.tensor_parallel) == (short, 64, 8, 1)
    assert (own.draft_model, own.most_drafts) == (None, 0)
    block = own.kv_memory_bytes // (8 * 64 // 8)
    less = config.model_copy(update={"draft_kv_memory_bytes": 17 * block + 1})
    assert load_draft.settings(less).kv_memory_bytes == 17 * block
    small_pages = config.model_copy(update={"page_size": 2, "draft_kv_memory_bytes": 17 * block // 4})
    assert load_draft.settings(small_pages).max_model_len == 17 * 2
    with pytest.raises(
        ConfigError, match=f"hold 15 blocks of 8 tokens, 16 are needed, which take {16 * block} bytes"
    ):
        load_draft.settings(config.model_copy(update={"draft_kv_memory_bytes": 16 * block - 1}))
    long_pages = config.model_copy(update={"page_size": 128})
    assert load_draft.settings(long_pages).kv_memory_bytes == 16 * block * 128 // 8
    shorter = config.model_copy(update={"max_model_len": 48})
    assert load_draft.settings(shorter).max_model_len == 48


@pytest.mark.parametrize("rank", [0, 1])
def test_the_leader_loads_the_draft_model_first(rank, monkeypatch):
    """So that the KV pool is sized by what it leaves, its pool set aside: a CPU's memory is in use once written to."""
    order, set_aside = list[str](), list[int]()
    draft = FakeRunner(4)
    draft.config = draft.config.model_copy(update={"kv_memory_bytes": 4096})

    def loaded(name: str, result: Any, draft_bytes: int = 0) -> Any:
        order.append(name)
        set_aside.append(draft_bytes)
        return result

    monkeypatch.setattr(load_draft, "load", lambda *_: loaded("draft", draft))
    monkeypatch.setattr(
        build, "load_model", lambda *_, draft_bytes, **__: loaded("target", "target", draft_bytes)
    )
    monkeypatch.setattr(local, "replace", lambda model, draft: (model, draft))
    config = WorkerConfig(role="decode", engine={"model": "/none", "device": "cpu", "draft_model": DRAFT})
    result: Any = local.load(config, rank, "")
    assert order == (["draft", "target"] if rank == 0 else ["target"])
    assert result == (("target", draft) if rank == 0 else "target")
    assert set_aside[-1] == (4096 if rank == 0 else 0)


def test_memory_set_aside_for_the_draft_models_pool_is_left_free(checkpoint):
    config = settings_for(checkpoint("llama"), None, "float32")
    aside = 1 << 50
    with pytest.raises(ConfigError, match=f"{aside} for the draft model's KV"):
        load_model(config, draft_bytes=aside)
