"""Reads an adapter from a PEFT directory: bounded, without pickle, every name and shape checked against the model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from cluster.errors import ModelError
from cluster.protocol import model_limits
from engine.lora.adapter_config import CONFIG, MAX_CONFIG_BYTES, AdapterConfig
from engine.lora.products import modules
from engine.model.config import ModelConfig
from engine.model.layer_weights import PREFIXES

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_HEADER_BYTES = 16 << 20
_DIGEST_BYTES = 16
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROOT = "base_model.model."
_SIDE = re.compile(r"(layers\.\d{1,5}\..+)\.lora_([AB])\.weight\Z")


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to the product of a module: x Aᵀ Bᵀ."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # float32 [outputs, rank], times the scaling

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class Adapter:
    digest: str  # of its weights and its configuration: 32 hexadecimal digits
    directory: Path
    rank: int  # the highest of its modules
    modules: Mapping[str, LowRank]  # by name without the model's prefix: layers.N.…


def read_adapter(
    directory: Path, config: ModelConfig, max_rank: int, dtype: torch.dtype = torch.float32
) -> Adapter:
    """`dtype`: in which it is computed; its numbers must be finite there. Raises ModelError naming the key, the tensor or
    the file."""
    wanted = modules(config)
    raw_config = _content(directory / CONFIG, MAX_CONFIG_BYTES)
    parsed = AdapterConfig.parse(raw_config)
    if not (directory / WEIGHTS).exists() and (directory / PICKLED).exists():
        raise ModelError(
            f"{directory} has {PICKLED} only, which is not read: it may run code; save it as {WEIGHTS}",
            field=PICKLED,
        )
    numbers = sum((outputs + inputs) * max_rank for outputs, inputs in wanted.values())
    content = _content(directory / WEIGHTS, numbers * 4 + MAX_HEADER_BYTES)
    try:
        tensors = safetensors.torch.load(content)
    except Exception as error:  # safetensors raises types of its own for damaged files
        raise ModelError(f"{directory / WEIGHTS}: {error}", field=WEIGHTS) from error
    digest = _digest(raw_config, content)
    del content  # the tensors are copies
    sides = _sides(tensors, wanted)
    pairs = {name: _pair(name, of, wanted[name], parsed, max_rank, dtype) for name, of in sides.items()}
    if not pairs:
        raise ModelError(f"{directory / WEIGHTS} has no tensors", field=WEIGHTS)
    highest = max(one.rank for one in pairs.values())
    return Adapter(digest, directory, highest, pairs)


def _digest(*contents: bytes) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for content in contents:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _content(file: Path, limit: int) -> bytes:
    try:
        size = model_limits.check_file(file)
        if size > limit:
            raise ValueError(
                f"{size} bytes are more than the {limit} that it may have with this model and max_lora_rank"
            )
        with file.open("rb") as opened:
            return opened.read(limit)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}", field=file.name) from error


def _sides(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, int]]
) -> dict[str, dict[str, tuple[str, Tensor]]]:
    """By module: its A and B, each with the tensor's name."""
    found: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = _SIDE.match(_without_prefix(name))
        if match is None or match[1] not in wanted:
            raise ModelError(
                f"tensor {name[:200]} is not supported: adapters may change the attention's products and those of MLPs "
                f"without experts; not embeddings, the output head, norms, routers or experts",
                field=name[:200],
            )
        of_module = found.setdefault(match[1], {})
        if match[2] in of_module:  # under another prefix
            raise ModelError(
                f"tensors {of_module[match[2]][0][:200]} and {name[:200]} are of the same module",
                field=name[:200],
            )
        of_module[match[2]] = (name, tensor)
    return found


def _without_prefix(name: str) -> str:
    inner = name.removeprefix(_ROOT)
    prefix = next((one for one in sorted(PREFIXES, key=len, reverse=True) if inner.startswith(one)), "")
    return inner.removeprefix(prefix)


def _pair(
    module: str,
    sides: Mapping[str, tuple[str, Tensor]],
    shape: tuple[int, int],
    config: AdapterConfig,
    max_rank: int,
    dtype: torch.dtype,
) -> LowRank:
    outputs, inputs = shape
    if len(sides) != 2:
        only = next(iter(sides.values()))[0]
        raise ModelError(f"tensor {only}: its other half, lora_A or lora_B, is missing", field=only)
    whole = sides["A"][0].removeprefix(_ROOT).removesuffix(".lora_A.weight")
    rank = config.rank_of(whole)
    if rank > max_rank:
        raise ModelError(
            f"{module} has rank {rank}, more than max_lora_rank {max_rank}", field="max_lora_rank"
        )
    for side, expected in (("A", (rank, inputs)), ("B", (outputs, rank))):
        name, tensor = sides[side]
        if tuple(tensor.shape) != expected:
            raise ModelError(
                f"tensor {name} has shape {tuple(tensor.shape)}, expected {expected}", field=name
            )
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"tensor {name} is stored as {tensor.dtype}, not in 16 or 32 bits", field=name)
    a, b = sides["A"][1], sides["B"][1].float() * config.scaling_of(whole)
    for side, numbers in (("A", a), ("B", b)):
        if not bool(torch.isfinite(numbers.to(dtype)).all()):
            name = sides[side][0]
            raise ModelError(
                f"tensor {name} has numbers that are NaN or infinite when scaled, in {dtype}", field=name
            )
    return LowRank(a, b)
