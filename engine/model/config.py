"""The model's configuration, read from a Hugging Face config.json."""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelError
from cluster.protocol import model_limits, output_head
from engine.model import experts, keys, rope
from engine.model.experts import ExpertConfig
from engine.model.families import FAMILIES, WRAPPER_KEYS
from engine.model.family import ACTIVATIONS, CLAMPED_SWIGLU, SILU, Family
from engine.model.rope import Rope
from engine.quant.formats import MXFP4_EXPERTS, StoredFormat, stored_format

_LAYER_TYPES = ("full_attention", "sliding_attention")
_MAX_LAYERS = 65_536
_MAX_HEAD_DIM = 65_536
_NUMBERS = (
    "norm_eps", "embedding_scale", "attention_scale", "attention_cap", "logits_cap", "logits_divisor", "swiglu_alpha",
    "swiglu_limit",
)  # fmt: skip
_MALFORMED = (
    TypeError,
    ValueError,
    AttributeError,
    KeyError,
    IndexError,
    ArithmeticError,
    RecursionError,  # nested too deeply
)


@dataclass(frozen=True)
class ModelConfig:
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_model_len: int
    rope: Rope
    tie_embeddings: bool
    attention_bias: bool  # q, k, v
    output_bias: bool  # o
    mlp_bias: bool
    windows: tuple[int, ...]  # per layer; 0 = full attention
    eos_token_ids: tuple[int, ...]
    dtype: str
    local_rope: Rope | None = None  # of layers with a window; None: as the others
    activation: str = SILU
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of scores; None: 1 / √head_dim
    attention_cap: float = 0.0  # scores are cap · tanh(score / cap); 0 = none
    logits_cap: float = 0.0
    logits_divisor: float = 1.0
    qk_norm: str = ""  # as in Family
    swiglu_alpha: float = 0.0  # of the clamped SwiGLU: gate · sigmoid(alpha · gate)
    swiglu_limit: float = 0.0  # of the clamped SwiGLU: gate and up are clamped to it
    experts: ExpertConfig | None = None
    quantization: StoredFormat | None = None  # of stored matrices
    generates: bool = True  # False: it has no output head, and makes embeddings only

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Raises ModelError naming the key."""
        try:
            raw: dict[str, Any] = json.loads(model_limits.text_of(directory / "config.json"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{directory}/config.json: {error}", field="config.json") from error
        try:
            found = cls._parse(directory, raw)
            found._check()
        except _MALFORMED as error:
            raise ModelError(f"{directory}/config.json: {error!r}", field="config.json") from error
        return found

    @property
    def table_of_layer(self) -> tuple[int, ...]:
        """For each layer, the number of its rotary table (`rotary.rotary_tables`)."""
        local = self.local_rope is not None
        return tuple(int(local and window > 0) for window in self.windows)

    def dim_order(self) -> list[int] | None:
        return rope.dim_order(self.rope, self.head_dim, self.family.interleaved_rope)

    def factor_set(self, max_len: int) -> str:
        """Which of longrope's two sets of factors a worker of this context takes; "" for other models."""
        return rope.factor_set(self.rope, max_len or self.max_model_len)

    def _check(self) -> None:
        """Raises ModelError naming the key that has no usable value."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for key in (*sizes, "head_dim", "max_model_len"):
            value = getattr(self, key)
            if type(value) is not int or not 0 < value < 2**31:
                raise ModelError(f"config.json: {key} is {value!r}, not a positive number", field=key)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads",
                field="num_key_value_heads",
            )
        if self.head_dim % 2 or self.head_dim > _MAX_HEAD_DIM:
            raise ModelError(
                f"config.json: head_dim is {self.head_dim}; rotary embedding needs an even one of up to {_MAX_HEAD_DIM}",
                field="head_dim",
            )
        for key in _NUMBERS:
            value = getattr(self, key)
            if value and not 0 < ctypes.c_float(value).value < math.inf:
                raise ModelError(
                    f"config.json: {key} is {value!r} by its keys, 0 or infinite in fp32", field=key
                )
        part = self.rope.get("partial_rotary_factor", 1.0)
        if part != 1.0 and not self.family.partial_rotary:
            raise ModelError(
                f"partial_rotary_factor {part!r} is not supported: whole heads of {self.family.title} are rotated",
                field="partial_rotary_factor",
            )
        for one in (self.rope, self.local_rope):
            if one is not None:
                rope.check(one, self.head_dim)
        if not all(type(value) is int for value in self.windows):
            raise ModelError(
                "config.json: sliding_window is not a number or a list of numbers", field="sliding_window"
            )
        if any(not 0 <= window < 2**31 for window in self.windows):
            raise ModelError(
                f"config.json: sliding_window is {max(self.windows, key=abs)}, negative or above 2**31 - 1",
                field="sliding_window",
            )
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"config.json: {len(self.windows)} layer_types for {self.num_layers} layers",
                field="layer_types",
            )

    @classmethod
    def _parse(cls, directory: Path, raw: dict[str, Any]) -> ModelConfig:
        name = model_limits.architecture(raw)
        keys.check_state(raw, name)
        family = FAMILIES.get(name)
        if family is None:
            raise ModelError(
                f"architecture {name} is not supported; supported: {', '.join(FAMILIES)}",
                field="architectures",
            )
        quantization = stored_format(raw)
        text = _text_part(raw, family)
        quantization = quantization or stored_format(text)
        _check_experts(quantization, family)
        prefix = "text_config." if name in model_limits.WRAPPERS else ""
        keys.check_known(text, family.title, family.keys, family.fixed, prefix)
        return _Reader(directory, raw, text, family).config(quantization)


def _check_experts(quantization: StoredFormat | None, family: Family) -> None:
    """Raise ModelError for quantised experts, except gpt-oss's in MXFP4, and for that format in any other family."""
    if quantization is None:
        return
    gpt_oss = family.experts is not None and family.experts.interleaved
    if gpt_oss != (quantization.name == MXFP4_EXPERTS) or (family.experts and not gpt_oss):
        raise ModelError(
            f"quantised experts ({quantization.title}) are not supported in {family.title}: use the unquantised "
            f"checkpoint",
            field="quantization_config",
        )


def _text_part(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    text = model_limits.text_part(raw)
    if text is raw:
        return raw
    keys.check_known(raw, family.title, WRAPPER_KEYS, {})
    # Hugging Face ties by the wrapper's own key, whose default is true
    return {**text, "tie_word_embeddings": raw.get("tie_word_embeddings", True)}


class _Reader:
    """Reads the keys of one configuration; those that are not there have the family's defaults."""

    def __init__(self, directory: Path, raw: dict[str, Any], text: dict[str, Any], family: Family):
        self._directory, self._raw, self._text, self._family = directory, raw, text, family
        self._longest = model_limits.context_tokens(raw)

    def get(self, key: str) -> Any:
        return self._text[key] if key in self._text else self._family.default(key)

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelError(f"config.json has no {key}", field=key)
        return value

    def positive(self, key: str, *, optional: bool = False) -> float:
        """A number above 0, or 0.0 where an optional one is null."""
        value = self.get(key)
        if optional and value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            raise ModelError(f"config.json: {key} is {value!r}, not a positive number", field=key)
        return float(value)

    def config(self, quantization: StoredFormat | None) -> ModelConfig:
        family, need = self._family, self.need
        if (vocab := model_limits.vocab_size(self._raw)) is None:
            raise ModelError("config.json has no vocab_size", field="vocab_size")
        heads, layers = need("num_attention_heads"), need("num_hidden_layers")
        if type(layers) is not int or not 0 < layers <= _MAX_LAYERS:  # lists below have an entry for each
            raise ModelError(
                f"config.json: num_hidden_layers is {layers!r}, not a number from 1 to {_MAX_LAYERS}",
                field="num_hidden_layers",
            )
        bias = {"never": False, "always": True}.get(family.attention_bias, bool(self.get(family.bias_key)))
        normed = not family.qk_norm_key or bool(self.get(family.qk_norm_key))
        windows = self._windows(layers)
        scales = self._scales()
        stored = self._raw.get("dtype") or self._raw.get("torch_dtype")
        stored = stored or self._text.get("dtype") or self._text.get("torch_dtype") or family.stored_dtype
        full, local = self._ropes()
        generates = output_head.has_head(self._raw, self._directory)
        return ModelConfig(
            family=family,
            vocab_size=vocab,
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.get("num_key_value_heads") or heads,
            head_dim=self.get("head_dim") or need("hidden_size") // heads,
            max_model_len=self._longest,
            rope=full,
            # Without a head no token is shown, but one is drawn: of the embedding
            tie_embeddings=bool(self.get("tie_word_embeddings")) or not generates,
            attention_bias=bias,
            output_bias=bias and family.output_bias,
            mlp_bias=family.mlp_bias and bool(self.get("mlp_bias")),
            windows=windows,
            eos_token_ids=model_limits.end_tokens(
                self._raw, model_limits.json_object(self._directory / "generation_config.json"), vocab
            ),
            dtype=str(stored).replace("torch.", ""),
            local_rope=local,
            activation=self._activation(),
            qk_norm=family.qk_norm if normed else "",
            experts=experts.read(self._text, self.get, family.experts, layers) if family.experts else None,
            quantization=quantization,
            generates=generates,
            **scales,
        )

    def _activation(self) -> str:
        if self._family.clamped_swiglu:
            return CLAMPED_SWIGLU
        key = self._family.activation_key
        name = self.get(key) or self._family.default(key)
        if name not in ACTIVATIONS:
            raise ModelError(
                f"{key} {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}", field=key
            )
        return ACTIVATIONS[name]

    def _scales(self) -> dict[str, Any]:
        """The norms' epsilon and the factors by which the family multiplies.

        Granite multiplies what each layer adds by r. Norms do not react to scale, so the stream is kept in units of r
        instead: embeddings are divided by r, the epsilons by r².
        """
        eps = self.get("rms_norm_eps")
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
            raise ModelError(
                f"config.json: rms_norm_eps is {eps!r}, not a small number", field="rms_norm_eps"
            )
        scales: dict[str, Any] = {"norm_eps": eps}
        if self._family.multipliers:
            residual = self.positive("residual_multiplier")
            scales["norm_eps"] = eps / residual**2
            scales["embedding_scale"] = self.positive("embedding_multiplier") / residual
            scales["attention_scale"] = self.positive("attention_multiplier")
            scales["logits_divisor"] = self.positive("logits_scaling")
        if self._family.scaled_embedding:
            scales["embedding_scale"] = self.positive("hidden_size") ** 0.5
            scales["attention_scale"] = self.positive("query_pre_attn_scalar") ** -0.5
        if self._family.soft_caps:
            scales["logits_cap"] = self.positive("final_logit_softcapping", optional=True)
            if "attn_logit_softcapping" in self._family.defaults:
                scales["attention_cap"] = self.positive("attn_logit_softcapping", optional=True)
        if self._family.clamped_swiglu:
            scales["swiglu_alpha"] = self.positive("swiglu_alpha")
            scales["swiglu_limit"] = self.positive("swiglu_limit")
        return scales

    def _ropes(self) -> tuple[Rope, Rope | None]:
        """The setting of layers without a window, and that of layers with one if the family has two."""
        family, text, longest = self._family, self._text, self._longest
        theta, partial = family.default("rope_theta"), family.default("partial_rotary_factor")
        if family.default("original_max_position_embeddings") is not None:
            text = {
                "original_max_position_embeddings": family.default("original_max_position_embeddings"),
                **text,
            }
        if not text.get("rope_scaling") and not text.get("rope_parameters"):
            text = {**text, "rope_parameters": family.default("rope_parameters")}
        if not family.local_rope:
            found = rope.read(text, theta, partial, longest)
            if family.older_longrope and found["rope_type"] in ("su", "yarn"):
                found = rope.read(
                    {**text, "rope_scaling": {**found, "rope_type": "longrope"}}, theta, partial, longest
                )
            return found, None
        local_theta = self.get("rope_local_base_freq")
        nested = text.get("rope_parameters") or {}
        if not isinstance(nested, dict) or any(key not in _LAYER_TYPES for key in nested):
            raise ModelError(
                "rope_parameters: this family has one setting for full_attention and one for sliding_attention",
                field="rope_parameters",
            )
        common = {"rope_theta": text.get("rope_theta", theta)}
        full = {"rope_parameters": nested.get("full_attention"), "rope_scaling": text.get("rope_scaling")}
        return (
            rope.read({**common, **full}, theta, partial, longest),
            rope.read(
                {"rope_parameters": nested.get("sliding_attention"), "rope_theta": local_theta},
                local_theta,
                partial,
                longest,
            ),
        )

    def _windows(self, layers: int) -> tuple[int, ...]:
        family, types = self._family, self.get("layer_types") or []
        if unknown := [kind for kind in types if kind not in _LAYER_TYPES]:
            raise ModelError(
                f"layer_types: {unknown[0]!r} is not supported; supported: {', '.join(_LAYER_TYPES)}",
                field="layer_types",
            )
        window = 0 if family.windows == "none" else self.get("sliding_window") or 0
        if "use_sliding_window" in family.keys and not self.get("use_sliding_window"):
            window = 0
        by_types = family.windows in ("last layers", "even layers", "layer_types")
        if types and window and by_types:
            return tuple(window if kind == "sliding_attention" else 0 for kind in types)
        if family.windows == "last layers":
            first = self.get("max_window_layers")
            return tuple(window if layer >= first else 0 for layer in range(layers))
        if family.windows == "even layers":
            end = self.get("max_window_layers")
            return tuple(0 if layer % 2 or layer >= end else window for layer in range(layers))
        if family.windows == "layer_types":
            every = family.window_every or self.positive("sliding_window_pattern")
            return tuple(window if (layer + 1) % every else 0 for layer in range(layers))
        if not by_types and any((kind == "sliding_attention") != bool(window) for kind in types):
            raise ModelError(
                f"layer_types: layers of {family.title} are all alike, these are not", field="layer_types"
            )
        return (window,) * layers
