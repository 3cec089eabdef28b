"""Rotary position embedding (Su et al., RoFormer): its kinds and their settings, as Hugging Face reads them.

The kernels rotate whole heads, half against half. Families that rotate a part of a head, or neighbours, are loaded with
the dimensions of queries and keys in another order (`dim_order`): their products are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import ModelError

Rope = dict[str, Any]
# The keys that each rope type needs.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
# Those that it may have.
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor", "factor"),
}
_SETS = ("short_factor", "long_factor")
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_MOST = 2**63
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")


def read(raw: Mapping[str, Any], theta: float, partial: float, longest: int) -> Rope:
    """The one setting of all layers. `theta` and `partial` are the family's defaults, `longest` the model's context."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope["rope_type"] = str(rope.get("rope_type") or rope.get("type") or "default")
    rope.setdefault("rope_theta", raw.get("rope_theta", theta))
    if raw.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in _WITH_ORIGINAL:
        own = raw.get("original_max_position_embeddings")
        if own is not None:
            rope["original_max_position_embeddings"] = own
        if rope["rope_type"] != "llama3":
            rope.setdefault("original_max_position_embeddings", longest)
            if rope.get("factor") is None and isinstance(rope["original_max_position_embeddings"], int):
                rope["factor"] = longest / rope["original_max_position_embeddings"]
    return rope


def rotated(rope: Rope, head_dim: int) -> int:
    """How many dimensions of a head are rotated."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def check(rope: Rope, head_dim: int) -> None:
    """Raise ModelError naming the key that is not supported, is missing, or has no usable value. Whether numbers together
    give finite angles, `rotary.check_angles` says."""
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ModelError(
            f"rope_parameters differ between layers ({', '.join(nested)}); this family has one setting for all layers",
            field="rope_parameters",
        )
    kind = kind_of(rope)
    if kind == "dynamic":
        raise ModelError(
            "rope type 'dynamic' is not supported: its keys depend on how long a text becomes later, so no cached prompt "
            "is right. Remove it from config.json and set max_position_embeddings to the original length",
            field="rope_parameters.rope_type",
        )
    if kind not in _NUMBERS:
        raise ModelError(
            f"rope type {kind!r} is not supported; supported: {', '.join(_NUMBERS)}. If it only extends the "
            f"context, remove it from config.json and set max_position_embeddings to the original length",
            field="rope_parameters.rope_type",
        )
    for key in ("rope_theta", "partial_rotary_factor", *_NUMBERS[kind]):
        _positive(kind, key, rope.get(key, 1.0 if key == "partial_rotary_factor" else None))
    for key in _OPTIONAL.get(kind, ()):
        if rope.get(key) is not None:
            _positive(kind, key, rope[key])
    part = rope.get("partial_rotary_factor", 1.0)
    if part > 1 or rotated(rope, head_dim) % 2 or not rotated(rope, head_dim):
        raise ModelError(
            f"partial_rotary_factor {part!r} rotates {rotated(rope, head_dim)} of {head_dim} dimensions; an even number "
            f"of up to all of them is needed",
            field="partial_rotary_factor",
        )
    _check_numbers(rope, kind, rotated(rope, head_dim))
    known = _ALWAYS | {*_NUMBERS[kind], *_OPTIONAL.get(kind, ())}
    known |= {*_SETS} if kind == "longrope" else {"truncate"} if kind == "yarn" else set()
    if more := [key for key, value in rope.items() if key not in known and value is not None]:
        raise ModelError(
            f"rope type {kind}: {more[0]} = {rope[more[0]]!r} is unknown: it may change the output",
            field=f"rope_parameters.{more[0]}",
        )


def _check_numbers(rope: Rope, kind: str, dim: int) -> None:
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ModelError(
            f"rope type llama3: high_freq_factor {rope['high_freq_factor']} must be above low_freq_factor "
            f"{rope['low_freq_factor']}",
            field="rope_parameters.high_freq_factor",
        )
    for key in _SETS if kind == "longrope" else ():
        numbers = rope.get(key)
        if not isinstance(numbers, list) or len(numbers) != dim // 2:
            raise ModelError(
                f"rope type longrope: {key} is not a list of {dim // 2} numbers",
                field=f"rope_parameters.{key}",
            )
        for number in numbers:
            _positive(kind, key, number)


def _positive(kind: str, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise ModelError(
            f"rope type {kind}: {key} is {value!r}, not a positive number", field=f"rope_parameters.{key}"
        )


def kind_of(rope: Rope) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def factor_set(rope: Rope, max_model_len: int) -> str:
    """Which of longrope's two sets of factors a worker of this context rotates by; "" for other types.

    One for all requests: with Hugging Face's choice by a text's length, no cached key would be right on both sides.
    """
    if kind_of(rope) != "longrope":
        return ""
    return "long" if max_model_len > rope["original_max_position_embeddings"] else "short"


def dim_order(rope: Rope, head_dim: int, interleaved: bool) -> list[int] | None:
    """The order in which a head's dimensions are loaded, so that dimension i is rotated against i + head_dim / 2; None
    if they lie so. `interleaved`: 2i is rotated against 2i + 1."""
    dim = rotated(rope, head_dim)
    if dim == head_dim and not interleaved:
        return None
    low, high = (
        (range(0, dim, 2), range(1, dim, 2)) if interleaved else (range(dim // 2), range(dim // 2, dim))
    )
    rest = range(dim, head_dim)
    half = len(rest) // 2
    return [*low, *rest[:half], *high, *rest[half:]]
