"""adapter_config.json of a PEFT directory: what scales an adapter, and what of PEFT is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.errors import ModelError

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096
# Keys that describe training, or that the names and shapes of the tensors state again.
_NEUTRAL = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
        "task_type", "use_rslora",
    }
)  # fmt: skip
# The weights of the base model were changed before the training began, and this adapter belongs to the changed ones.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
N = TypeVar("N", int, float)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]{1,256}\Z")


def refused(key: str, reason: str) -> ModelError:
    return ModelError(f"{CONFIG}: {key} {reason}", field=key)


@dataclass(frozen=True)
class AdapterConfig:
    """Rank and scaling of every module; the first pattern counts that is a module's name or the end of it."""

    rank: int
    alpha: float
    by_root: bool  # rank-stabilised: alpha / √rank
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, content: bytes) -> AdapterConfig:
        """Raises ModelError naming the key."""
        try:
            raw = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{CONFIG}: {error}", field=CONFIG) from error
        if not isinstance(raw, dict):
            raise ModelError(f"{CONFIG} is not an object", field=CONFIG)
        _check_supported(raw)
        ranks = _pattern(raw, "rank_pattern")
        alphas = _pattern(raw, "alpha_pattern")
        return cls(
            _rank("r", raw.get("r", 8)),
            _alpha("lora_alpha", raw.get("lora_alpha", 8)),
            raw.get("use_rslora") is True,
            {name: _rank("rank_pattern", value) for name, value in ranks.items()},
            {name: _alpha("alpha_pattern", value) for name, value in alphas.items()},
        )

    def rank_of(self, module: str) -> int:
        """`module`: its whole name in the base model."""
        return _first(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _first(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def _first(pattern: Mapping[str, N], module: str, default: N) -> N:
    """The value of the first entry that is the module's name or the end of it, as PEFT takes them."""
    return next((value for name, value in pattern.items() if f".{module}".endswith(f".{name}")), default)


def _check_supported(raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise refused("peft_type", f"{str(raw.get('peft_type'))[:80]!r} is not supported: LORA is")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise refused("task_type", f"{str(raw['task_type'])[:80]!r} is not supported: CAUSAL_LM is")
    if raw.get("bias", "none") != "none":
        raise refused("bias", f"{str(raw['bias'])[:80]!r} is not supported: biases stay the base model's")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise refused(
            "init_lora_weights",
            f"{start[:80]!r} is not supported: it belongs to changed weights of the base model; save it converted",
        )
    if type(raw.get("use_rslora", False)) is not bool:
        raise refused("use_rslora", "is neither true nor false")
    for key, value in raw.items():
        if key not in _NEUTRAL and key not in _READ and value:
            raise refused(key[:80], "is not supported: only products with plain low-rank weights are")


def _pattern(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict) or len(found) > MAX_PATTERNS:
        raise refused(key, f"is not an object of at most {MAX_PATTERNS} entries")
    for name in found:
        if not _PLAIN_NAME.match(name):
            raise refused(key, f"has {name[:80]!r}: only names of modules are supported, no expressions")
    return found


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**20:
        raise refused(key, f"is {str(value)[:80]!r}, not a positive number")
    return value


def _alpha(key: str, value: Any) -> float:
    # Not `>`, which NaN passes; integers may exceed a float
    if type(value) not in (int, float) or not abs(value) <= 1e9:
        raise refused(key, f"is {str(value)[:80]!r}, not a number of up to 1e9")
    return float(value)
