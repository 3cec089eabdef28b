"""Model ids differ if any weight differs, or any setting that changes output, and are equal otherwise."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ModelError
from engine.model import keys
from worker.model_id import WHOLE_BYTES, make_model_id, samples


@pytest.fixture
def model(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def edit(model: Path, name: str = "config.json", **changes: object) -> None:
    path = model / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **changes}))


def sized(model: Path, rows: int) -> Path:
    """Enlarge the vocabulary, so that the embeddings are sampled and other tensors come before them."""
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(rows, 64, generator=torch.Generator().manual_seed(len(name)))
    save_file(tensors, model / "model.safetensors")
    edit(model, vocab_size=rows)
    return model


def change(model: Path, name: str, *at: int) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name][at] += 0.5
    save_file(tensors, model / "model.safetensors")


def test_a_late_tensor_a_middle_one_and_one_number_of_a_norm_part_two_checkpoints(model: Path) -> None:
    sized(model, 40_000)  # 10 MB each: far more than the beginning of the file
    seen = [make_model_id(model)]
    tensors = load_file(model / "model.safetensors")
    assert len(tensors) > 20
    for name, tensor in tensors.items():
        if tensor.numel() * 4 > WHOLE_BYTES:
            change(model, name)  # all of it, as another training would
        elif tensor.ndim == 1:
            change(model, name, tensor.numel() - 1)
        else:
            change(model, name, tensor.shape[0] - 1, 7)
        seen.append(make_model_id(model))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_a_large_tensor_is_looked_at_from_end_to_end(model: Path, share: float) -> None:
    """A difference in any contiguous tenth is detected."""
    sized(model, 40_000)
    before = make_model_id(model)
    tensors = load_file(model / "model.safetensors")
    begin = int(share * 36_000)
    tensors["lm_head.weight"][begin : begin + 4_000] += 0.5
    save_file(tensors, model / "model.safetensors")
    assert make_model_id(model) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"max_position_embeddings": 512},
        {"eos_token_id": [2, 7]},
    ],
)
def test_a_key_that_changes_output_changes_the_id(model: Path, changes: dict[str, Any]) -> None:
    (model / "generation_config.json").unlink()  # its end tokens would go before
    before = make_model_id(model)
    edit(model, **changes)
    assert make_model_id(model) != before


def test_an_unknown_key_is_refused_and_not_hashed(model: Path) -> None:
    edit(model, a_key_of_next_year={"attends": "backwards"})
    with pytest.raises(ModelError) as caught:
        make_model_id(model)
    assert caught.value.field == "a_key_of_next_year"


def test_what_weights_are_made_into_changes_the_id(model: Path) -> None:
    assert make_model_id(model, quantization="int8") != make_model_id(model)


def test_workers_on_either_side_of_longropes_border_are_apart(model: Path) -> None:
    """They rotate by other factors; for every other model the context is no part of the id."""
    assert make_model_id(model, max_model_len=64) == make_model_id(model)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    edit(
        model,
        rope_parameters={"rope_type": "longrope", **factors, "original_max_position_embeddings": 128},
    )
    assert make_model_id(model, max_model_len=128) == make_model_id(model, max_model_len=64)
    assert make_model_id(model, max_model_len=129) == make_model_id(model)
    assert make_model_id(model, max_model_len=128) != make_model_id(model)


def test_end_tokens_change_the_id_in_any_config_file(model: Path) -> None:
    before = make_model_id(model)
    edit(model, "generation_config.json", eos_token_id=[2, 9])
    assert make_model_id(model) != before


def test_the_format_of_kv_changes_the_id(model: Path) -> None:
    """bf16 is what auto means where it is allowed."""
    policies = ("auto", "bf16", "int8", "bf16>int8")
    ids = [make_model_id(model, "bfloat16", kv_dtype=policy) for policy in policies]
    assert ids[0] == ids[1] and len(set(ids)) == 3


def test_the_quantization_changes_the_id(model: Path) -> None:
    assert make_model_id(model, quantization="int8") != make_model_id(model)


def test_the_compute_dtype_changes_the_id(model: Path) -> None:
    assert make_model_id(model, "bfloat16") != make_model_id(model, "float32")
    assert make_model_id(model, "auto") == make_model_id(model, "float32")  # it is stored so
    edit(model, dtype="bfloat16", torch_dtype="bfloat16")
    assert make_model_id(model, "auto") == make_model_id(model, "bfloat16")


def test_defaults_of_generation_and_notes_do_not_part_them(model: Path) -> None:
    before = make_model_id(model)
    edit(model, "generation_config.json", temperature=0.3, top_p=0.5, max_length=77, transformers_version="9")
    edit(
        model,
        transformers_version="9",
        _name_or_path="elsewhere",
        use_cache=False,
        temperature=0.3,
        rope_scaling=None,
    )
    assert make_model_id(model) == before


def test_notes_in_a_text_part_do_not_count() -> None:
    part = {"hidden_size": 64, "use_cache": False, "dtype": "bfloat16", "rope_scaling": None}
    assert keys.hashed({"text_config": part}) == {"text_config": {"hidden_size": 64}}


def test_the_same_tensors_in_other_files_are_the_same_model(model: Path) -> None:
    before = make_model_id(model)
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    for cut, prefix in ((5, "model"), (11, "weights")):
        files = {f"{prefix}-00001.safetensors": names[:cut], f"{prefix}-00002.safetensors": names[cut:]}
        for file, mine in files.items():
            save_file({name: tensors[name] for name in mine}, model / file, metadata={"written": prefix})
        listed = [(name, file) for file, mine in files.items() for name in mine]
        index = {"weight_map": dict(reversed(listed))}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        assert make_model_id(model) == before
    change(model, names[0])  # in a file that the index does not name
    assert make_model_id(model) == before


def test_two_tensors_that_change_places_part_them(model: Path) -> None:
    before = make_model_id(model)
    tensors = load_file(model / "model.safetensors")
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 2))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, model / "model.safetensors")
    assert make_model_id(model) != before


def test_a_renamed_tensor_changes_the_id(model: Path) -> None:
    before = make_model_id(model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight2"] = tensors.pop("model.norm.weight")  # at the same place in their order
    save_file(tensors, model / "model.safetensors")
    assert make_model_id(model) != before


def test_numbers_of_another_type_part_them(model: Path) -> None:
    before = make_model_id(model)
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name: tensor.view(torch.int32) for name, tensor in tensors.items()}, model / "model.safetensors"
    )
    assert make_model_id(model) != before


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 40]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": 7},
        {"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        [],
    ],
)
def test_a_header_that_is_not_true_is_refused_by_the_files_name(model: Path, header: object) -> None:
    raw = json.dumps(header).encode()
    (model / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ModelError) as caught:
        make_model_id(model)
    assert caught.value.field == "x.safetensors"


@pytest.mark.parametrize("size", [0, 5, 8, 1 << 62])
def test_a_header_that_is_not_there_is_refused(model: Path, size: int) -> None:
    (model / "x.safetensors").write_bytes(struct.pack("<Q", size)[: size if size < 8 else 8])
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ModelError) as caught:
        make_model_id(model)
    assert caught.value.field == "x.safetensors"


def llama_70b() -> dict[str, list[int]]:
    layer = {
        "input_layernorm": [8192],
        "post_attention_layernorm": [8192],
        "self_attn.q_proj": [8192, 8192],
        "self_attn.k_proj": [1024, 8192],
        "self_attn.v_proj": [1024, 8192],
        "self_attn.o_proj": [8192, 8192],
        "mlp.gate_proj": [28672, 8192],
        "mlp.up_proj": [28672, 8192],
        "mlp.down_proj": [8192, 28672],
    }
    tensors = {f"model.layers.{i}.{name}.weight": shape for i in range(80) for name, shape in layer.items()}
    return {**tensors, "model.norm.weight": [8192], "lm_head.weight": [128256, 8192], "embed": [128256, 8192]}


def sparse(path: Path, tensors: dict[str, list[int]]) -> int:
    """Write a sparse file of the right size; returns the size."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return at


@pytest.mark.parametrize(
    ("tensors", "least_gb", "most_mib"),
    [
        (llama_70b(), 140, 40),
        ({f"expert.{number}": [2048, 1024] for number in range(20_000)}, 80, 257),
    ],
    ids=["70B", "20,000 experts"],
)
def test_a_large_checkpoint_costs_a_bounded_number_of_bytes(tmp_path, tensors, least_gb, most_mib) -> None:
    file = tmp_path / "model.safetensors"
    assert sparse(file, tensors) > least_gb * 10**9
    read = sum(len(piece) for piece in samples(dict.fromkeys(tensors, file)))
    assert read <= most_mib << 20
