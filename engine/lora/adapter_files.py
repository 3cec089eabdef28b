"""Reads a rank's share of an adapter from a PEFT directory: once and in parts, bounded, without pickle, every name and
shape checked against the model before any number is read."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import CancelledError, ModelError
from cluster.protocol import model_limits
from engine.lora import stored_tensors
from engine.lora.adapter_config import CONFIG, MAX_CONFIG_BYTES, AdapterConfig
from engine.lora.message import LANES
from engine.lora.products import Part, parts
from engine.lora.stored_tensors import LENGTH_BYTES, StoredTensor
from engine.model.config import ModelConfig
from engine.model.layer_weights import PREFIXES

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
_DIGEST_BYTES = 16
_ROOT = "base_model.model."
_SIDE = re.compile(r"(layers\.\d{1,5}\..+)\.lora_([AB])\.weight\Z")
_ENTRY_BYTES = 512  # of a tensor in the header: PEFT's have 160
_METADATA_BYTES = 1 << 16
# A tensor as stored and in fp32, scaled and in the type of the products, with the result of the check.
_COPIES_BYTES = 16
_PARSED = 8  # Python's objects take so much more than their text


@dataclass(frozen=True)
class LowRank:
    """An adapter's matrices for a rank's outputs of a module, to which x Aᵀ Bᵀ is added."""

    a: Tensor  # [rank, the share's inputs]
    b: Tensor  # [the outputs of the share's parts, rank], times the scaling

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class Adapter:
    digest: str  # of its weights and its configuration: 32 hexadecimal digits
    directory: Path
    rank: int  # the highest of its modules
    modules: Mapping[str, LowRank]  # by name without the model's prefix: layers.N.…


@dataclass(frozen=True)
class Share:
    """The part of an adapter that a rank keeps, and its type, in which all numbers must be finite."""

    model: ModelConfig
    max_rank: int
    dtype: torch.dtype = torch.float32
    rank: int = 0
    size: int = 1

    @property
    def parts(self) -> Mapping[str, Sequence[Part]]:
        return parts(self.model, self.rank, self.size)


def read_bytes(model: ModelConfig, config: EngineConfig, itemsize: int) -> int:
    """Bytes of main memory that a rank takes at most while it reads an adapter in each lane; `itemsize`: of a number of
    products."""
    own = parts(model, 0, config.tensor_parallel)
    widths = sum(part.width for of_module in own.values() for part in of_module)
    kept = (widths + sum(of_module[0].own_inputs for of_module in own.values())) * itemsize
    largest = max(max(one.outputs, one.inputs) for one, *_ in own.values()) * _COPIES_BYTES
    parsed = _PARSED * (_header_bytes(len(own)) + MAX_CONFIG_BYTES)
    return LANES * (config.max_lora_rank * (kept + largest) + parsed)


def _header_bytes(modules: int) -> int:
    return 2 * modules * _ENTRY_BYTES + _METADATA_BYTES


def read_adapter(directory: Path, share: Share, stopped: threading.Event | None = None) -> Adapter:
    """Raises ModelError naming the key, the tensor or the file, and CancelledError once `stopped` is set."""
    wanted = share.parts
    raw_config = _config(directory / CONFIG)
    parsed = AdapterConfig.parse(raw_config)
    if not (directory / WEIGHTS).exists() and (directory / PICKLED).exists():
        raise ModelError(
            f"{directory} has {PICKLED} only, which is not read: it may run code; save it as {WEIGHTS}",
            field=PICKLED,
        )
    digest = _Digest()
    digest.add_whole(raw_config)
    file = directory / WEIGHTS
    try:
        size = _size(
            file, wanted, share.max_rank
        )  # before it is opened: a named pipe would wait for its writer
        with file.open("rb") as opened:
            kept = _kept(opened, size, share, parsed, digest, stopped)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}", field=file.name) from error
    highest = max(len(sides["A"]) for sides in kept.values())
    found = {name: LowRank(sides["A"], sides["B"]) for name, sides in kept.items()}
    return Adapter(digest.text, directory, highest, found)


class _Digest:
    def __init__(self) -> None:
        self._made = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.add = self._made.update

    def add_whole(self, content: bytes) -> None:
        self.begin(len(content))
        self.add(content)

    def begin(self, size: int) -> None:
        self.add(size.to_bytes(8, "little"))

    @property
    def text(self) -> str:
        return self._made.hexdigest()


def _config(file: Path) -> bytes:
    try:
        if (size := model_limits.check_file(file)) > MAX_CONFIG_BYTES:
            raise ValueError(f"{size} bytes are more than the {MAX_CONFIG_BYTES} that it may have")
        with file.open("rb") as opened:
            return opened.read(MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}", field=file.name) from error


def _size(file: Path, wanted: Mapping[str, Sequence[Part]], max_rank: int) -> int:
    """Raises OSError or ValueError."""
    numbers = sum((one.outputs + one.inputs) * max_rank for one, *_ in wanted.values())
    limit, size = numbers * 4 + _header_bytes(len(wanted)) + LENGTH_BYTES, model_limits.check_file(file)
    if size > limit:
        raise ValueError(
            f"{size} bytes are more than the {limit} that it may have with this model and max_lora_rank"
        )
    return size


def _kept(
    opened: BinaryIO,
    size: int,
    share: Share,
    config: AdapterConfig,
    digest: _Digest,
    stopped: threading.Event | None,
) -> dict[str, dict[str, Tensor]]:
    """This rank's A and B of every module, with only one tensor of the file in memory at a time."""
    wanted = share.parts
    digest.begin(size)
    head = _read(opened, LENGTH_BYTES, digest)
    length, most = int.from_bytes(head, "little"), min(size - LENGTH_BYTES, _header_bytes(len(wanted)))
    if length > most:
        raise ValueError(f"its header of {length} bytes is longer than the {most} that it may have")
    tensors = stored_tensors.parse(_read(opened, length, digest), size - LENGTH_BYTES - length)
    places = _checked(tensors, wanted, config, share.max_rank)
    kept: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        if stopped is not None and stopped.is_set():
            raise CancelledError("the adapter is not wanted any more")
        module, side = places[tensor.name]
        content = bytearray(tensor.size)
        _fill(opened, content, digest)
        dtype = tensor.torch_dtype
        assert dtype is not None, "others are refused"
        numbers = torch.frombuffer(content, dtype=dtype).view(tensor.shape)
        scaling = config.scaling_of(_whole(tensor.name)) if side == "B" else 1.0
        kept.setdefault(module, {})[side] = _cut(tensor.name, numbers, side, scaling, wanted[module], share)
    return kept


def _read(opened: BinaryIO, count: int, digest: _Digest) -> bytes:
    content = bytearray(count)
    _fill(opened, content, digest)
    return bytes(content)


def _fill(opened: BinaryIO, content: bytearray, digest: _Digest) -> None:
    if opened.readinto(content) != len(content):  # type: ignore[attr-defined]
        raise ValueError("it ends early")
    digest.add(content)


def _cut(name: str, numbers: Tensor, side: str, scaling: float, own: Sequence[Part], share: Share) -> Tensor:
    """This rank's share. The whole tensor is checked, so that all ranks refuse it."""
    scaled = numbers.float() * scaling if side == "B" else numbers
    made = scaled.to(share.dtype)
    if not bool(torch.isfinite(made).all()):
        raise ModelError(
            f"tensor {name} has numbers that are NaN or infinite when scaled, in {share.dtype}", field=name
        )
    if side == "A":
        return made[:, own[0].columns].clone(memory_format=torch.contiguous_format)
    return torch.cat([part.own_b(share.model, made) for part in own])


def _checked(
    tensors: Sequence[StoredTensor],
    wanted: Mapping[str, Sequence[Part]],
    config: AdapterConfig,
    max_rank: int,
) -> dict[str, tuple[str, str]]:
    """Module and side, A or B, of each tensor by its name. Raises ModelError."""
    sides = _sides(tensors, wanted)
    if not sides:
        raise ModelError(f"{WEIGHTS} has no tensors", field=WEIGHTS)
    for module, found in sides.items():
        _check_pair(module, found, wanted[module][0], config, max_rank)
    return {one.name: (module, side) for module, found in sides.items() for side, one in found.items()}


def _sides(
    tensors: Sequence[StoredTensor], wanted: Mapping[str, Sequence[Part]]
) -> dict[str, dict[str, StoredTensor]]:
    """A and B of each module."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        name = tensor.name
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
                f"tensors {of_module[match[2]].name[:200]} and {name[:200]} are of the same module",
                field=name[:200],
            )
        of_module[match[2]] = tensor
    return found


def _without_prefix(name: str) -> str:
    inner = name.removeprefix(_ROOT)
    prefix = next((one for one in sorted(PREFIXES, key=len, reverse=True) if inner.startswith(one)), "")
    return inner.removeprefix(prefix)


def _whole(name: str) -> str:
    """The module's name in the base model, by which patterns name it."""
    return name.removeprefix(_ROOT).removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")


def _check_pair(
    module: str, sides: Mapping[str, StoredTensor], part: Part, config: AdapterConfig, max_rank: int
) -> None:
    if len(sides) != 2:
        only = next(iter(sides.values())).name
        raise ModelError(f"tensor {only}: its other half, lora_A or lora_B, is missing", field=only)
    if _whole(sides["A"].name) != (other := _whole(sides["B"].name)):  # patterns may tell the two apart
        raise ModelError(f"tensor {sides['A'].name}: its other half is of {other}", field=sides["A"].name)
    rank = config.rank_of(other)
    if rank > max_rank:
        raise ModelError(
            f"{module} has rank {rank}, more than max_lora_rank {max_rank}", field="max_lora_rank"
        )
    for side, expected in (("A", (rank, part.inputs)), ("B", (part.outputs, rank))):
        tensor = sides[side]
        if tensor.torch_dtype is None:
            raise ModelError(
                f"tensor {tensor.name} is stored as {tensor.dtype}, not in 16 or 32 bits", field=tensor.name
            )
        if tensor.shape != expected:
            raise ModelError(
                f"tensor {tensor.name} has shape {tensor.shape}, expected {expected}", field=tensor.name
            )
