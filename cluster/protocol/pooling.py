"""How a checkpoint makes one vector, an embedding, of a prompt: sentence-transformers' files in its directory.

`modules.json` lists the steps. Served are those of decoders: the transformer, one pooling of its last hidden states, and
a normalisation. Routers read them; workers get the pooling with each request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.errors import ModelError
from cluster.protocol import model_limits
from cluster.protocol.output_head import MODULES


class Pooling(IntEnum):
    """Which hidden states make the vector; numbers as in `SamplingParams.pooling` of the wire."""

    NONE = 0
    MEAN = 1  # the mean of all positions
    CLS = 2  # the first position
    LAST_TOKEN = 3
    MAX = 4  # the largest value of each dimension

    @property
    def needs_each_position(self) -> bool:
        """Whether positions of a cached prefix, whose hidden states are gone, would be missing."""
        return self not in (Pooling.NONE, Pooling.LAST_TOKEN)


_OF_NAME = {
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST_TOKEN,
    "max": Pooling.MAX,
}
# Keys of older files, each true or false
_OF_KEY = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
    "pooling_mode_max_tokens": Pooling.MAX,
}
_MODE = "pooling_mode"
_SETTINGS = "sentence_bert_config.json"  # of the transformer, by sentence-transformers
_MAX_MODULES = 16
_MAX_DIMENSIONS = 1024  # entries of matryoshka_dimensions


@dataclass(frozen=True)
class Embedding:
    """Facts about a checkpoint that the router needs to answer with embeddings."""

    pooling: Pooling
    dimensions: int  # of a vector
    normalised: bool  # to length 1
    max_tokens: int | None = None  # of a prompt, as the checkpoint says; None: the context's
    # Shorter vectors that the model was trained for (Matryoshka): the lengths, or () for any; None: none
    shorter: tuple[int, ...] | None = None

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any]) -> Embedding | None:
        """None: the directory has no `modules.json`, its model makes no embeddings. `config`: its config.json.

        Raises ModelError naming the file or key that is malformed or asks for what is not computed.
        """
        try:
            return cls._read(directory, config)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ModelError(f"{directory}: embeddings: {error!r}", field=MODULES) from error

    @classmethod
    def _read(cls, directory: Path, config: Mapping[str, Any]) -> Embedding | None:
        if not (directory / MODULES).exists():
            return None
        modules = json.loads(model_limits.text_of(directory / MODULES))
        if not isinstance(modules, list) or not 0 < len(modules) <= _MAX_MODULES:
            raise ModelError(f"{MODULES} is not a list of up to {_MAX_MODULES} modules", field=MODULES)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ModelError(
                f"{MODULES}: {', '.join(kinds)[:200]}: only Transformer, Pooling and perhaps Normalize are computed",
                field=MODULES,
            )
        pooling, dimensions = _pooling(_object(directory / _inside(str(modules[1]["path"])) / "config.json"))
        if dimensions != (hidden := model_limits.text_part(config).get("hidden_size")):
            raise ModelError(
                f"the pooling's word_embedding_dimension is {dimensions!r}, hidden_size {hidden!r}",
                field="word_embedding_dimension",
            )
        base = directory / _inside(str(modules[0].get("path", "")))
        return cls(pooling, dimensions, len(kinds) == 3, _most_tokens(base), _shorter(config, dimensions))


def _inside(path: str) -> PurePosixPath:
    """Raises ModelError: a module's files are in the model's directory."""
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts:
        raise ModelError(f"{MODULES}: path {path[:200]!r} leads out of the directory", field=MODULES)
    return found


def _object(file: Path) -> dict[str, Any]:
    found = json.loads(model_limits.text_of(file))
    if not isinstance(found, dict):
        raise ModelError(f"{file} is not a JSON object", field=file.name)
    return found


def _pooling(config: Mapping[str, Any]) -> tuple[Pooling, Any]:
    """The pooling, and the dimensions of what it pools."""
    if (mode := config.get(_MODE)) is not None:
        modes = [mode] if isinstance(mode, str) else list(mode)
    else:
        modes = [key for key, value in config.items() if key.startswith(f"{_MODE}_") and value]
    known = {**_OF_NAME, **_OF_KEY}
    if len(modes) != 1 or modes[0] not in known:
        raise ModelError(
            f"pooling {', '.join(map(str, modes))[:200] or 'none'}: one of {', '.join(_OF_NAME)} is computed",
            field=_MODE,
        )
    dimensions = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    return known[modes[0]], dimensions


def _most_tokens(base: Path) -> int | None:
    if not (base / _SETTINGS).exists():
        return None
    settings = _object(base / _SETTINGS)
    if settings.get("do_lower_case"):
        raise ModelError(f"{_SETTINGS}: do_lower_case is not computed", field="do_lower_case")
    most = settings.get("max_seq_length")
    if most is not None and (type(most) is not int or not 0 < most < 2**31):
        raise ModelError(
            f"{_SETTINGS}: max_seq_length is {most!r}, not a positive number", field="max_seq_length"
        )
    return most


def _shorter(config: Mapping[str, Any], dimensions: int) -> tuple[int, ...] | None:
    """vLLM's keys: `matryoshka_dimensions`, or `is_matryoshka` for any length."""
    lengths = config.get("matryoshka_dimensions")
    if lengths is None:
        return () if config.get("is_matryoshka") is True else None
    if (
        not isinstance(lengths, list)
        or not 0 < len(lengths) <= _MAX_DIMENSIONS
        or not all(type(one) is int and 0 < one <= dimensions for one in lengths)
    ):
        raise ModelError(
            f"matryoshka_dimensions are not numbers from 1 to {dimensions}", field="matryoshka_dimensions"
        )
    return tuple(sorted({*lengths, dimensions}))
