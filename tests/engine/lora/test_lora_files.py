"""Adapters are read bounded and without pickle; what is not supported is refused by name."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.worker import EngineConfig
from cluster.errors import CancelledError, ModelError
from engine.lora.adapter_config import AdapterConfig
from engine.lora.adapter_files import Adapter, Share, _Digest, read_adapter
from engine.model.config import ModelConfig
from tests.harness.adapters import make_adapter

CONFIGS = [
    ({"peft_type": "LOHA"}, "peft_type"),
    ({"task_type": "SEQ_CLS"}, "task_type"),
    ({"bias": "lora_only"}, "bias"),
    ({"use_dora": True}, "use_dora"),
    ({"lora_bias": True}, "lora_bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"a_later_key": 1}, "a_later_key"),
    ({"use_rslora": 1}, "use_rslora"),
    ({"r": 0}, "r"),
    ({"r": 17}, "max_lora_rank"),
    ({"lora_alpha": math.inf}, "lora_alpha"),
    ({"lora_alpha": math.nan}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"rank_pattern": {"(a+)+": 2}}, "rank_pattern"),
    ({"rank_pattern": {f"n{i}": 2 for i in range(4097)}}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
]


@pytest.fixture
def model(checkpoint) -> Path:
    return checkpoint("llama")


def read(directory: Path, model: Path) -> Adapter:
    return read_adapter(directory, Share(ModelConfig.read(model), 16))


@pytest.mark.parametrize(("keys", "field"), CONFIGS)
def test_what_is_not_supported_is_refused_by_name(keys, field, model, tmp_path):
    adapter = make_adapter(tmp_path, model)
    raw = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(raw | keys))
    with pytest.raises(ModelError) as refusal:
        read(adapter, model)
    assert refusal.value.field == field


def test_neutral_keys_of_peft_are_accepted(model, tmp_path):
    more: dict[str, Any] = {
        "use_dora": False,
        "modules_to_save": None,
        "lora_dropout": 0.1,
        "megatron_core": "megatron.core",
    }
    made = make_adapter(tmp_path, model, inference_mode=True, init_lora_weights="gaussian", **more)
    assert read(made, model).rank == 4


def _rename(tensors, to):
    tensors[to] = tensors.pop(next(name for name in tensors if "q_proj.lora_A" in name))


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
OTHER = NAME.replace("_A", "_B")
TENSORS = [
    (lambda t: t.pop(NAME), "other half"),
    (lambda t: _rename(t, "base_model.model.lm_head.lora_A.weight"), "lm_head"),
    (lambda t: _rename(t, "base_model.model.model.embed_tokens.lora_embedding_A"), "embed_tokens"),
    (lambda t: _rename(t, "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"), "layers.9"),
    (lambda t: t.update({NAME: t[NAME][:, 1:].clone()}), "has shape"),
    (lambda t: t.update({NAME: t[NAME][1:].clone()}), "has shape"),
    (lambda t: t.update({NAME: t[NAME].double()}), "F64"),
    (lambda t: t[NAME].fill_(math.nan), "NaN"),
    (lambda t: t[NAME.replace("_A", "_B")].fill_(3e38), "when scaled"),
    (
        lambda t: t.update({NAME.replace("model.layers", "model.language_model.layers"): t[NAME] + 1}),
        "same module",
    ),
    (
        lambda t: t.update({OTHER.replace("model.layers", "model.language_model.layers"): t.pop(OTHER)}),
        "its other half is of",
    ),
    (lambda t: t.clear(), "no tensors"),
]


@pytest.mark.parametrize(("change", "says"), TENSORS)
def test_tensors_are_checked_against_the_model(change, says, model, tmp_path):
    adapter = make_adapter(tmp_path, model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=says):
        read(adapter, model)


def test_numbers_must_be_finite_in_the_type_of_the_products(model, tmp_path):
    adapter = make_adapter(tmp_path, model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[NAME].fill_(1e6)
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = ModelConfig.read(model)
    assert read_adapter(adapter, Share(config, 16, torch.bfloat16)).rank == 4
    with pytest.raises(ModelError, match="infinite when scaled"):
        read_adapter(adapter, Share(config, 16, torch.float16))


def test_files_are_bounded_and_never_pickled(model, tmp_path):
    adapter = make_adapter(tmp_path / "a", model)
    shutil.move(adapter / "adapter_model.safetensors", adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="may run code"):
        read(adapter, model)
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="more than the"):
        read(adapter, model)
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="adapter_config"):
        read(adapter, model)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_named_pipe_is_refused_unopened(name, model, tmp_path):
    """Its opening waited for a writer, for good: the call of the load ended after 60 s, and a thread was gone."""
    adapter = make_adapter(tmp_path, model)
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(ModelError, match="not a regular file"):
        read(adapter, model)


def test_the_digest_is_of_weights_and_configuration(model, tmp_path):
    first = make_adapter(tmp_path / "a", model, seed=1)
    digest = read(first, model).digest
    assert digest == read(Path(shutil.copytree(first, tmp_path / "b")), model).digest
    assert digest != read(make_adapter(tmp_path / "c", model, seed=2), model).digest
    changed = Path(shutil.copytree(first, tmp_path / "d")) / "adapter_config.json"
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {"lora_alpha": 9}))
    assert digest != read(changed.parent, model).digest, "the weights are the same"


def test_a_digest_tells_where_the_configuration_ends():
    def digest(*contents):
        made = _Digest()
        for one in contents:
            made.add_whole(one)
        return made.text

    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc")}) == 3


def test_scaling_by_rank_its_root_and_patterns():
    """The first pattern that matches counts, as for PEFT."""
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    raw |= {"rank_pattern": {"model.layers.1.q_proj": 2, "q_proj": 16, "layers.2.q_proj": 8}}
    raw |= {"alpha_pattern": {"v_proj": 2}}
    plain = AdapterConfig.parse(json.dumps(raw).encode())
    stable = AdapterConfig.parse(json.dumps(raw | {"use_rslora": True}).encode())
    wanted = {
        "0.q_proj": 8 / 16,
        "1.q_proj": 8 / 2,
        "2.q_proj": 8 / 16,
        "0.v_proj": 2 / 4,
        "0.xq_proj": 8 / 4,
    }
    assert {name: plain.scaling_of(f"model.layers.{name}") for name in wanted} == wanted
    assert stable.scaling_of("model.layers.0.q_proj") == 8 / 4


@pytest.mark.parametrize(
    "entries", [("a",), ("=d",), ("a b=d",), ("a=",), ("a=x", "a=y"), ("a=x", "b=y", "c=z")]
)
def test_settings_are_checked(entries):
    with pytest.raises(ValueError, match="lora"):
        EngineConfig(model=Path("/none"), lora=entries, max_loras=2)


def test_stored_in_half_precision(model, tmp_path):
    adapter = make_adapter(tmp_path, model)
    tensors = {k: v.to(torch.bfloat16) for k, v in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert read(adapter, model).modules["layers.0.self_attn.q_proj"].b.dtype is torch.float32


def _header(text: bytes, content: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + content


ENTRY = b'"t":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
DAMAGED = [
    (b"", "ends early"),
    ((1 << 60).to_bytes(8, "little"), "its header"),
    (_header(b"{"), "Expecting"),
    (_header(b"[]"), "not an object"),
    (_header(b"[" * 5000), "nested"),
    (_header(b'{"t":3}'), "no dtype"),
    (_header(b'{"t":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'), "no dtype"),
    (_header(b"{" + ENTRY % (0, 4) + b"," + ENTRY % (0, 4) + b"}", b"1234"), "twice"),
    (_header(b"{" + ENTRY % (0, 8) + b"}", b"12345678"), "not those of its shape"),
    (_header(b"{" + ENTRY % (4, 8) + b"}", b"12345678"), "begins at byte 4"),
    (_header(b"{" + ENTRY % (0, 4) + b"}", b"123"), "4 bytes, the file has 3"),
    (_header(b"{" + ENTRY % (0, 4) + b"}", b"12345"), "4 bytes, the file has 5"),
]


@pytest.mark.parametrize(("content", "says"), DAMAGED)
def test_damaged_files_are_refused(content, says, model, tmp_path):
    adapter = make_adapter(tmp_path, model)
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=says):
        read(adapter, model)


def test_ranks_keep_their_shares(model, tmp_path):
    """Side by side they are the whole, and the digest is of the whole file."""
    adapter, config = make_adapter(tmp_path, model), ModelConfig.read(model)
    whole = read(adapter, model)
    halves = [read_adapter(adapter, Share(config, 16, rank=rank, size=2)) for rank in range(2)]
    assert {one.digest for one in halves} == {whole.digest}
    for name, one in whole.modules.items():
        mine = [half.modules[name] for half in halves]
        split = name.endswith(("o_proj", "down_proj"))
        assert torch.equal(torch.cat([half.a for half in mine], 1) if split else mine[0].a, one.a)
        assert torch.equal(mine[1].b if split else torch.cat([half.b for half in mine]), one.b)


def test_a_reading_that_is_not_wanted_any_more_ends(model, tmp_path):
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(CancelledError):
        read_adapter(make_adapter(tmp_path, model), Share(ModelConfig.read(model), 16), stopped)
