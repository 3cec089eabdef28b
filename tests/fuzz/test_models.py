"""Malformed model directories are refused by a ModelError before anything listens."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.router import RouterConfig
from cluster.errors import ConfigError, InvalidRequestError, ModelError
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from router.request.options import GenerationOptions
from router.request.validator import Envelope, Validator
from router.text.conversation import Conversation
from router.text.tokenizer import ModelText
from tests.fuzz.conftest import few
from tests.fuzz.strategies import anything
from tests.fuzz.tally import ANSWERED, REFUSED, Tally
from worker.model_id import make_model_id

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CONFIG_KEYS = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "eos_token_id",
    "sliding_window",
    "rms_norm_eps",
    "torch_dtype",
    "quantization_config",
)
KEYS = {
    "config.json": CONFIG_KEYS,
    "generation_config.json": ("temperature", "top_k", "top_p", "eos_token_id"),
    "tokenizer_config.json": ("chat_template", "bos_token", "eos_token", "pad_token"),
    "tokenizer.json": ("model", "version", "added_tokens", "pre_tokenizer", "decoder"),
}


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("llama")


def read_all(directory: Path, tally: Tally) -> None:
    """Everything that a router and a worker read before they serve."""
    outcome = ANSWERED
    for read in (ModelConfig.read, make_model_id, _text, _weights):
        try:
            read(directory)
        except (ModelError, ConfigError):
            outcome = REFUSED
    tally.count("model directories", outcome)


def _text(directory: Path) -> None:
    text = ModelText(directory, RouterConfig(model=directory).tokenized_cache_bytes)
    with contextlib.closing(text), contextlib.suppress(InvalidRequestError):
        assert text.vocab_size > 0 and text.max_position_embeddings > 0
        Validator(RouterConfig(model=directory), text).completion([1], GenerationOptions(), Envelope())
        text.render(Conversation([{"role": "user", "content": "hello"}]))


def _weights(directory: Path) -> None:
    Checkpoint(directory, torch.float32, torch.device("cpu")).get("model.norm.weight", 64)


def spoiled(model: Path, name: str, content: bytes, tally: Tally) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        shutil.copytree(model, directory)
        (directory / name).write_bytes(content)
        read_all(directory, tally)


@few(80, 0.05)
@given(data=st.data(), name=st.sampled_from(FILES))
def test_a_key_that_holds_something_else(data, name, model, tally):
    file = model / name
    content = json.loads(file.read_text()) if file.exists() else {}
    for key in data.draw(st.lists(st.sampled_from(KEYS[name]), min_size=1, max_size=3, unique=True)):
        content[key] = data.draw(anything)
    spoiled(model, name, json.dumps(content).encode(), tally)


@few(30, 0.02)
@given(
    name=st.sampled_from([*FILES, "chat_template.jinja"]),
    content=st.binary(max_size=80) | anything.map(repr).map(str.encode),
)
def test_a_file_that_holds_something_else(name, content, model, tally):
    spoiled(model, name, content, tally)


@few(20, 0.015)
@given(begin=st.integers(0, 400), noise=st.binary(min_size=1, max_size=16), cut=st.booleans())
def test_weights_that_are_torn(begin, noise, cut, model, tally):
    raw = (model / "model.safetensors").read_bytes()
    torn = raw[:begin] if cut else raw[:begin] + noise + raw[begin + len(noise) :]
    spoiled(model, "model.safetensors", torn, tally)


@few(20, 0.015)
@given(content=st.one_of(anything, st.dictionaries(st.just("weight_map"), anything)))
def test_an_index_with_foreign_entries_only(content, model, tally):
    spoiled(model, "model.safetensors.index.json", json.dumps(content).encode(), tally)


def test_an_index_cannot_name_files_elsewhere(model, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    for name in ("../model.safetensors", "/etc/passwd", "a/b"):
        index = {"weight_map": {"model.norm.weight": name}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError):
            Checkpoint(directory, torch.float32, torch.device("cpu"))
