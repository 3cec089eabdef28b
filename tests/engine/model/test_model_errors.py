"""A model directory that can't be served gives one error that names the tensor, the key or the setting."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError, ModelError
from cluster.protocol import model_limits
from engine.build import load_model
from engine.model import layer_weights, rotary
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from engine.runner import ModelRunner
from worker.model_id import make_model_id


@pytest.fixture
def model(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def load(model: Path, **settings) -> None:
    ModelRunner(load_model(EngineConfig(model=model, kv_memory_bytes=8 << 20, max_model_len=256, **settings)))


def edit(model: Path, **changes) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(model: Path, change) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
    ],
)
def test_a_wrong_config_names_its_key(changes, field, model):
    edit(model, **changes)
    with pytest.raises(ModelError) as caught:
        load(model)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e-300}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "beta_fast": 5e-324}},
         "rope_parameters"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 2**70}, "sliding_window"),
        ({"head_dim": 2**30}, "head_dim"),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 1e-160}, "norm_eps"),
        ({"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 1e-50}, "embedding_scale"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_computed_with_are_named(changes, field, model):
    edit(model, **changes)
    with pytest.raises(ModelError) as caught:
        rotary.check_angles(ModelConfig.read(model))
    assert caught.value.field == field


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_only_regular_files_are_read(kind, file, model):
    """Reading others may never end."""
    (model / file).unlink(missing_ok=True)
    if kind == "device":
        (model / file).symlink_to("/dev/zero")
    else:
        {"pipe": os.mkfifo, "directory": os.mkdir}[kind](model / file)
    for read in (load, make_model_id):
        with pytest.raises(ModelError, match=f"{file}.*not a regular file") as caught:
            read(model)
        assert caught.value.field == file


def test_a_file_that_an_index_names_is_a_regular_one(model):
    index = {"weight_map": {"model.norm.weight": "other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(model / "other.safetensors")
    with pytest.raises(ModelError, match=r"other\.safetensors: it is not a regular file"):
        make_model_id(model)


def test_a_text_that_is_too_large_is_not_read(model, monkeypatch):
    os.truncate(model / "config.json", model_limits.MAX_TEXT_BYTES + 1)
    with pytest.raises(ModelError, match="are more than"):
        ModelConfig.read(model)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_file_is_checked_once_when_tensors_are_read(indexed, model, monkeypatch):
    """On a network file system each look at a file takes milliseconds, and there may be hundreds."""
    if indexed:
        index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    checked = Counter[str]()
    check = model_limits.check_file

    def counted(file: Path) -> int:
        checked[file.name] += 1
        return check(file)

    monkeypatch.setattr(model_limits, "check_file", counted)
    with Checkpoint(model, torch.float32, torch.device("cpu")) as tensors:
        assert tensors.shape("model.norm.weight") == (64,)
    assert checked["model.safetensors"] == 1


def test_a_checkpoint_with_links_to_its_files_is_read(model):
    """As in Hugging Face's cache."""
    for file in ("config.json", "model.safetensors"):
        (model / file).rename(model / f"blob-{file}")
        (model / file).symlink_to(f"blob-{file}")
    load(model)


def test_any_number_of_experts_is_counted_at_once(checkpoint, tmp_path):
    model = Path(shutil.copytree(checkpoint("mixtral"), tmp_path / "model"))
    edit(model, num_local_experts=2**31 - 1)
    with pytest.raises(ConfigError, match="weights") as caught:
        load(model)
    assert caught.value.field == "kv_memory"


@pytest.mark.parametrize("row", [0, 250, 511])
def test_a_head_that_differs_in_one_row_is_counted_before_the_load(row, checkpoint, monkeypatch):
    monkeypatch.setattr(layer_weights, "_COMPARED_ROWS", 100)
    model = checkpoint("llama")
    config = dataclasses.replace(ModelConfig.read(model), tie_embeddings=True)
    name = "model.embed_tokens.weight"
    part = Checkpoint.part

    def tied(self, of, shape, *parts, why=""):
        found = part(self, name if of == "lm_head.weight" else of, shape, *parts, why=why).clone()
        if of == "lm_head.weight" and parts[0].start <= changed < parts[0].stop:
            found[changed - parts[0].start, 0] += 1
        return found

    monkeypatch.setattr(Checkpoint, "part", tied)
    with Checkpoint(model, torch.float32, torch.device("cpu")) as tensors:
        weights = layer_weights.LayerWeights(config, tensors, 0, 1)
        changed = -1
        assert not weights.has_untied_head()
        changed = row
        assert weights.has_untied_head()


def test_a_stored_head_of_tied_embeddings_is_read_in_parts(checkpoint, monkeypatch):
    read = dict[str, int]()
    part = Checkpoint.part

    def counted(self, name, shape, *parts, why=""):
        found = part(self, name, shape, *parts, why=why)
        read[name] = read.get(name, 0) + len(found)
        return found

    monkeypatch.setattr(Checkpoint, "part", counted)
    monkeypatch.setattr(layer_weights, "_COMPARED_ROWS", 16)
    model = checkpoint("llama")
    raw = json.loads((model / "config.json").read_text())
    config = dataclasses.replace(ModelConfig.read(model), tie_embeddings=True)
    with Checkpoint(model, torch.float32, torch.device("cpu")) as tensors:
        weights = layer_weights.LayerWeights(config, tensors, 0, 1)
        embedding = weights.embedding(slice(0, raw["vocab_size"]))
        weights._equals_embedding = lambda name, rows, embedding: True  # type: ignore[method-assign]
        assert not weights.has_untied_head()
        assert weights.head(slice(0, raw["vocab_size"]), embedding) is embedding
    assert read == {"model.embed_tokens.weight": 2 * raw["vocab_size"]}


def test_a_missing_tensor_is_named(model):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(model, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match="missing") as caught:
        load(model)
    assert caught.value.field == name


def test_a_file_that_this_user_may_not_read_is_named_with_the_user(model, monkeypatch):
    """As for a container's user where the file is root's alone. Root may read everything, so the answers are made up."""

    def refuse(*_):
        raise FileNotFoundError("No such file or directory")

    monkeypatch.setattr("engine.model.weights.safe_open", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ModelError, match=f"model.safetensors may not be read by user {os.geteuid()}"):
        load(model)


def test_a_wrong_shape_is_named_with_both_shapes(model):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(model, lambda tensors: tensors.update({name: torch.zeros(3, 64)}))
    with pytest.raises(ModelError, match=r"\(3, 64\), expected \(32, 64\)") as caught:
        load(model)
    assert caught.value.field == name


@pytest.mark.parametrize("broken", [b"", b"not safetensors at all"])
def test_a_torn_file_is_named(broken, model):
    (model / "model.safetensors").write_bytes(broken)
    with pytest.raises(ModelError) as caught:
        load(model)
    assert caught.value.field == "model.safetensors"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_brackets_without_end_are_refused(file, model):
    (model / file).write_text('{"weight_map": ' + "[" * 100_000)
    with pytest.raises(ModelError, match=file):
        load(model)


@pytest.mark.parametrize(("kind", "bits"), [("F4", 4), ("F6_E2M3", 6)])
def test_tensors_of_types_that_are_not_read_are_named(kind, bits, tmp_path):
    entry = {"dtype": kind, "shape": [4, 8], "data_offsets": [0, 4 * bits]}
    header = json.dumps({"a.weight": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(4 * bits)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        Checkpoint(tmp_path, torch.float32, torch.device("cpu")).get("a.weight", 4, 8)
    assert caught.value.field == "a.weight"


def test_a_tensor_that_only_the_index_has_is_named(tmp_path):
    save_file({"a.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"b.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        Checkpoint(tmp_path, torch.float32, torch.device("cpu")).get("b.weight", 4, 8)
    assert caught.value.field == "b.weight"


def test_a_directory_without_weights_is_refused(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(model)


def test_a_pool_smaller_than_a_context_is_refused_with_the_difference(model):
    with pytest.raises(ConfigError, match="more") as caught:
        ModelRunner(load_model(EngineConfig(model=model, kv_memory_bytes=1 << 16, max_model_len=256)))
    assert caught.value.field == "kv_memory"


def test_sharded_checkpoints_load_like_single_ones(model, checkpoint):
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    half = len(names) // 2
    shards = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, mine in shards.items():
        save_file({name: tensors[name] for name in mine}, model / file)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, mine in shards.items() for name in mine}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    load(model)
    (model / "b.safetensors").unlink()
    for read in (load, make_model_id):
        with pytest.raises(
            ModelError, match=r"/b\.safetensors is missing, and the index names it: download it"
        ) as caught:
            read(model)
        assert caught.value.field == "b.safetensors"
