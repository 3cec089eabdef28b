"""The model id: workers exchange KV and share prefixes only if theirs are equal.

Of the weights it covers every tensor's name, dtype and shape, and some of its bytes: reading hundreds of gigabytes would
make every start slow. Tensors of up to 64 KiB (norms, biases) are read whole. Of each larger one sixteen pieces are read,
spread evenly from its first byte to its last: 64 KiB in all, or less if all large tensors would need more than 256 MiB.
For a 70B Llama (141 GB) that is 38 MiB. A change of single rows between the pieces is not detected; another training or
merge is. File names and the distribution of tensors over files do not count. Of config.json every key counts that is not
cosmetic (engine/model/keys.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelError
from cluster.protocol import model_limits
from engine.build import compute_dtype
from engine.model import keys
from engine.model.config import ModelConfig
from engine.model.weights import tensor_files

WHOLE_BYTES = 64 << 10
PIECES = 16
MAX_SAMPLED_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000  # the format's limit


@dataclass(frozen=True)
class _Stored:
    """The place of a tensor's bytes in its file."""

    meaning: str  # type and shape
    begin: int
    end: int


def samples(files: dict[str, Path]) -> Iterator[bytes]:
    """The bytes to hash. `files` maps each tensor's name to its file. Raises ModelError naming the file."""
    headers = {file: _read_header(file) for file in sorted(set(files.values()))}
    stored: dict[str, _Stored] = {}
    for name, file in files.items():
        if name not in headers[file]:
            raise ModelError(f"{file}: tensor {name} is missing", field=file.name)
        stored[name] = headers[file][name]
    large = sum(one.end - one.begin > WHOLE_BYTES for one in stored.values())
    each = min(WHOLE_BYTES, MAX_SAMPLED_BYTES // max(1, large)) // PIECES
    opened = {file: os.open(file, os.O_RDONLY) for file in headers}
    try:
        for name, one in sorted(stored.items()):
            yield f"\0{name}:{one.meaning}:".encode()
            for begin, end in _spans(one, each):
                yield os.pread(opened[files[name]], end - begin, begin)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _spans(one: _Stored, piece: int) -> Iterator[tuple[int, int]]:
    size = one.end - one.begin
    if size <= WHOLE_BYTES:
        yield one.begin, one.end
        return
    for number in range(PIECES):
        begin = one.begin + (size - piece) * number // (PIECES - 1)
        yield begin, begin + piece


def _read_header(file: Path) -> dict[str, _Stored]:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"the header of {length} bytes is missing or cut off")
            header: dict[str, Any] = json.loads(opened.read(length))
        data = 8 + length
        return {name: _stored(entry, data, size) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise ModelError(f"{file}: {error!r}", field=file.name) from error


def _stored(entry: dict[str, Any], data: int, size: int) -> _Stored:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= size - data:
        raise ValueError(f"data_offsets {begin}, {end} of {size - data} bytes")
    return _Stored(f"{entry['dtype']}{entry['shape']}", data + begin, data + end)


def make_model_id(
    model: Path,
    dtype: str = "auto",
    quantization: str = "auto",
    *,
    max_model_len: int = 0,
    kv_dtype: str = "auto",
) -> str:
    """The model id of the checkpoint in `model`, computed in `dtype` and `quantization` with KV in `kv_dtype`: equal ids
    mean equal output.

    `max_model_len`: the worker's context, 0 = the model's. Raises ModelError naming the key or the file.
    """
    config = ModelConfig.read(model)
    facts = keys.hashed(json.loads(model_limits.text_of(model / "config.json")))
    resolved: dict[str, Any] = {
        "compute": compute_dtype(dtype, config.dtype),
        "eos": sorted(config.eos_token_ids),
    }
    # Only where there is a choice: other models keep their ids
    if factors := config.factor_set(max_model_len):
        resolved["rope factors"] = factors
    if quantization != "auto":
        resolved["quantization"] = quantization
    if kv_dtype not in ("auto", "bf16"):  # bf16 is what auto means where it is allowed
        resolved["kv"] = kv_dtype
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps([facts, resolved], sort_keys=True).encode())
    for sample in samples(tensor_files(model)):
        digest.update(sample)
    return f"{model.name}-{digest.hexdigest()}"
