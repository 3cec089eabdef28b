"""What `baton up` refuses before it starts a process, and what it must not refuse."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton.local import preflight
from baton.local.model_directory import check_directory, check_place
from baton.local.options import UpOptions
from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from cluster.sockets import listen
from engine.model.preflight import least_bytes, read_model


def check_ports(model: Path, **router: object) -> None:
    preflight.check(UpOptions(model, pool="process", routers=2, router=router))


def free_ports(count: int = 4) -> int:
    """The first of so many neighbours that are free on 127.0.0.1, below those of outgoing connections."""
    for first in range(20_000 + os.getpid() * count % 10_000, 32_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "[::1]", "::"])
def test_ports_on_every_form_of_host(host, model):
    if ":" in host:
        try:
            listen("::1", 0, 1).close()
        except OSError:
            pytest.skip("no IPv6 here")
    first = free_ports()
    check_ports(model, host=host, http_port=first, grpc_port=first + 2)


def test_ports_of_two_routers_that_overlap(model):
    first = free_ports()
    with pytest.raises(
        ConfigError, match=rf"--http-port {first + 1} of router 1 is --grpc-port of router 0 too"
    ):
        check_ports(model, http_port=first, grpc_port=first + 1)


@pytest.mark.parametrize("host", ["203.0.113.7", "a..b", "a" * 70])
def test_a_host_that_is_no_address_of_this_machine(host, model):
    with pytest.raises(ConfigError) as refused:
        check_ports(model, host=host, http_port=free_ports())
    assert refused.value.field == "host"


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"http_port": "abc"}, "--http-port: Input should be a valid integer"),
        ({"models": [1]}, "--config: models.0: "),
        ({"unknown": 1}, "--config: there is no setting unknown"),
    ],
)
def test_wrong_values_in_a_file(section, sentence, model):
    with pytest.raises(ConfigError) as refused:
        UpOptions(model, sections={"router": section})
    assert refused.value.message.startswith(sentence)


def test_an_adapter_and_the_folder_of_the_hubs_cache_are_explained(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"holds a LoRA adapter, .* --lora NAME=DIR"):
        check_directory(adapter, "--model")
    cached = tmp_path / "models--a--b"
    (cached / "snapshots").mkdir(parents=True)
    model.rename(cached / "snapshots" / "0123")
    with pytest.raises(ConfigError, match=r"there is one in .*snapshots/0123"):
        check_directory(cached, "--model")


def test_links_into_the_hubs_blobs_shards_of_any_name_and_read_only_directories_are_taken(model, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        name = "weights-of-any-name.safetensors" if file.suffix == ".safetensors" else file.name
        (model / name).symlink_to(f"../blobs/{number}")
    index = {"weight_map": {"a": "weights-of-any-name.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    model.chmod(0o555)
    check_directory(model, "--model")


def test_a_name_that_is_too_long_is_no_question_of_rights(tmp_path):
    with pytest.raises(ConfigError) as refused:
        check_directory(tmp_path / ("a" * 300), "--model")
    assert "File name too long" in refused.value.message and "right" not in refused.value.message


def weights(model: Path, **more: np.ndarray) -> list[Path]:
    """A file of one tensor of 1000 numbers in fp32, and of further ones."""
    save_file(
        {"model.layers.0.mlp.up_proj.weight": np.zeros(1000, np.float32), **more}, model / "model.safetensors"
    )
    return [model / "model.safetensors"]


@pytest.mark.parametrize(
    ("stored", "settings", "expected"),
    [
        ("float32", {}, 4000),
        ("float32", {"dtype": "bfloat16"}, 2000),
        ("bfloat16", {}, 2000),  # config.json and the file differ, as in many published models
        ("bfloat16", {"dtype": "float32"}, 4000),
        ("float32", {"quantization": "int8"}, 1000),
    ],
)
def test_the_least_that_weights_take_goes_by_their_files(stored, settings, expected, model):
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "dtype": stored, "torch_dtype": stored}))
    config = EngineConfig(model=model, **settings)
    assert least_bytes(config, read_model(config), weights(model)) == expected


def test_tensors_that_are_not_loaded_take_nothing(model):
    config = EngineConfig(model=model, dtype="float32")
    read, zeros = read_model(config), np.zeros(1000, np.float32)
    names = (f"model.layers.{read.num_layers}.mtp", "vision_tower.encoder.layers.0.weight")
    assert least_bytes(config, read, weights(model, **dict.fromkeys(names, zeros))) == 4000
    tied = {"language_model.model.embed_tokens.weight": zeros, "lm_head.weight": zeros}
    assert least_bytes(config, read, weights(model, **tied)) == (8000 if read.tie_embeddings else 12000)


def test_damaged_files_and_pipes_are_left_to_the_worker(model, tmp_path):
    config = EngineConfig(model=model)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "damaged").write_bytes(b"\xff" * 100)
    files = [tmp_path / "pipe", tmp_path / "damaged", tmp_path / "missing"]
    assert least_bytes(config, read_model(config), files) == 0


def test_options_ask_for_the_place_alone(checkpoint, tmp_path):
    """Tests and scripts make options of a directory before anything else is in it."""
    with pytest.raises(ConfigError, match=r"--model .*: no such directory") as refused:
        UpOptions(tmp_path / "none")
    assert refused.value.field == "model"
    with pytest.raises(ConfigError, match=r"--also b=.*: no config\.json there") as refused:
        UpOptions(checkpoint("llama"), also=(f"b={tmp_path}",), pool="process")
    assert refused.value.field == "also"
    (tmp_path / "config.json").write_text("{}")
    check_place(tmp_path, "--model")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json there"):
        check_directory(tmp_path, "--model")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json there") as refused:
        check_directory(tmp_path, "--also b=")
    assert refused.value.field == "also"


@pytest.mark.parametrize("name", ["base", "large", "second"])
def test_an_adapter_with_the_name_of_a_model(name, model):
    """Requests for it would reach that model."""
    router = {"served_model_name": "base", "model_aliases": ["large"]}
    engine = {"lora": [f"{name}=/adapters/x"]}
    options = UpOptions(
        model, pool="process", router=router, worker={"engine": engine}, also=[f"second={model}"]
    )
    with pytest.raises(ConfigError, match=f"--lora {name}=/adapters/x: {name} is the name or an alias"):
        preflight.check(options)
