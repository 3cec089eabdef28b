"""Frequencies and tables of the rotary position embedding, as Hugging Face computes them (kinds: `rope`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cluster.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.rope import Rope, factor_set, kind_of, rotated


def rotary_tables(model: ModelConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [tables, max_len, head_dim / 2]; which one a layer takes: `ModelConfig.table_of_layer`."""
    ropes = [model.rope] if model.local_rope is None else [model.rope, model.local_rope]
    cos, sin = zip(*(head_tables(one, model.head_dim, max_len) for one in ropes), strict=True)
    return torch.stack(cos), torch.stack(sin)


def check_angles(model: ModelConfig) -> None:
    """Raise ModelError if a rope's numbers give no finite angles of all positions of the model."""
    longest = model.max_model_len
    for rope in (model.rope, model.local_rope):
        if rope is None:
            continue
        kind, dim = kind_of(rope), rotated(rope, model.head_dim)
        for length in (1, longest):  # by the two sets of longrope
            try:
                inverse, scaling = frequencies(rope, dim, length)
                fits = bool((inverse * longest).isfinite().all()) and math.isfinite(scaling)
            except (ArithmeticError, ValueError) as error:  # a logarithm of 1, for example, divides
                raise ModelError(
                    f"rope type {kind}: its numbers give no angles: {error}", field="rope_parameters"
                ) from error
            if not fits:
                raise ModelError(
                    f"rope type {kind}: angles of {longest} positions are not finite", field="rope_parameters"
                )


def frequencies(rope: Rope, dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """float32 [dim / 2] of `dim` rotated dimensions, and what cosines and sines are multiplied by."""
    kind = kind_of(rope)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    base = rope["rope_theta"]
    if kind == "longrope":
        factors = torch.tensor(rope[f"{factor_set(rope, max_model_len)}_factor"], dtype=torch.float32)
        return 1.0 / (factors * base**exponents), _longrope_scaling(rope)
    freq: Tensor = 1.0 / (base**exponents)
    if kind == "linear":
        return freq / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(rope, freq), 1.0
    if kind == "yarn":
        return _yarn(rope, base**exponents, dim), _yarn_scaling(rope)
    return freq, 1.0


def _llama3(rope: Rope, freq: Tensor) -> Tensor:
    """Llama 3's scaling as in its reference code."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freq
    scaled = torch.where(wavelength > old / low, freq / factor, freq)
    smooth = (old / wavelength - low) / (high - low)
    middle = ~(wavelength < old / high) & ~(wavelength > old / low)
    found: Tensor = torch.where(middle, (1 - smooth) / factor * freq + smooth * freq, scaled)
    return found


def _yarn(rope: Rope, periods: Tensor, dim: int) -> Tensor:
    """Peng et al., YaRN, section 3.2: low frequencies are interpolated, high ones are not, those between are blended."""
    original, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def dimension(rotations: float) -> float:
        return float(dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept: Tensor = 1 - ramp
    found: Tensor = 1.0 / (rope["factor"] * periods) * (1 - kept) + 1.0 / periods * kept
    return found


def _yarn_scaling(rope: Rope) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scaling(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scaling(rope["mscale"]) / scaling(rope["mscale_all_dim"])
    return scaling(1.0)


def _longrope_scaling(rope: Rope) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = rope["factor"]
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))


def tables(inverse_frequencies: Tensor, max_len: int, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, number of frequencies], computed once."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies)
    return angles.cos() * scaling, angles.sin() * scaling


def head_tables(rope: Rope, head_dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim / 2]; dimensions that are not rotated have an angle of 0."""
    dim = rotated(rope, head_dim)
    inverse, scaling = frequencies(rope, dim, max_len)
    cos, sin = tables(inverse, max_len, scaling)
    rest = (head_dim - dim) // 2
    if not rest:
        return cos, sin
    return torch.cat((cos, torch.ones(max_len, rest)), 1), torch.cat((sin, torch.zeros(max_len, rest)), 1)
