"""Keys of config.json: those that change nothing, and those for which a model is refused.

A checkpoint is served only if every key is understood: read, cosmetic, or with the one value that the engine computes
(Hugging Face's default). A key that is ignored would be found out by wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import ModelError

# Keys that do not change the engine's output: notes, training settings, generation defaults (applied by the router), and
# dtypes and end tokens, which are read apart. The model id (worker/model_id.py) leaves them out.
COSMETIC_KEYS = frozenset({
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "auto_map", "transformers_version", "transformers.js_config", "task_specific_params", "finetuning_task",
    "problem_type", "id2label", "label2id", "num_labels", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "return_dict_in_generate", "output_scores", "torchscript", "use_bfloat16", "pretraining_tp",
    "gradient_checkpointing", "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop",
    "classifier_dropout", "router_aux_loss_coef", "output_router_logits", "tokenizer_class", "prefix",
    "cache_implementation", "unsloth_fixed", "unsloth_version", "is_llama_config", "max_sequence_length",
    "chunk_size_feed_forward", "tf_legacy_loss", "is_decoder", "architectures", "model_type",
    # Gemma's: another spelling of sliding_window, and what layer_types was made from.
    "sliding_window_size", "_sliding_window_pattern",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "do_sample", "num_beams", "num_beam_groups", "max_length",
    "min_length", "max_new_tokens", "repetition_penalty", "length_penalty", "diversity_penalty", "early_stopping",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "dtype", "torch_dtype", "eos_token_id",
    # Shorter embeddings, which the router cuts.
    "is_matryoshka", "matryoshka_dimensions",
})  # fmt: skip
# Cosmetic for `check`, but part of the model id.
_NAMES = frozenset({"architectures", "model_type"})

# Parts of architectures' names, in lower case, and keys of config.json.
_RECURRENT = (
    "mamba", "jamba", "zamba", "bamba", "rwkv", "recurrentgemma", "xlstm", "falconh1", "lfm2", "nemotronh", "plamo2",
    "qwen3next", "granitemoehybrid", "minimaxm1", "minimaxtext01", "kimilinear", "retnet", "griffin", "olmohybrid",
)  # fmt: skip
_RECURRENT_KEYS = (
    "ssm_cfg", "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "ssm_state_size", "state_size", "lru_width",
    "linear_conv_kernel_dim", "layers_block_type", "hybrid_override_pattern", "conv_L_cache",
)  # fmt: skip
_SHOWN = 60  # characters of a value in an error


def hashed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the model id covers, without those that are null; also inside the configuration of a text part."""
    ignored = COSMETIC_KEYS - _NAMES
    kept = {key: value for key, value in raw.items() if key not in ignored and value is not None}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = hashed(text)
    return kept


def check_state(raw: Mapping[str, Any], architecture: str) -> None:
    """Raise ModelError if the model keeps a recurrent state."""
    name = architecture.lower().replace("_", "").replace("-", "")
    field = "architectures" if any(part in name for part in _RECURRENT) else ""
    field = field or next((key for key in _RECURRENT_KEYS if raw.get(key) is not None), "")
    if field:
        raise ModelError(
            f"{architecture} keeps a recurrent state ({field} = {_shown(raw[field])}): its prompts cannot be cached, "
            f"preempted or handed over block by block",
            field=field,
        )


def check_known(
    raw: Mapping[str, Any], family: str, read: frozenset[str], fixed: Mapping[str, Any], prefix: str = ""
) -> None:
    """Raise ModelError naming a key that is neither `read` nor cosmetic and has another value than in `fixed`, or
    than null or false if it is in neither."""
    for key, value in raw.items():
        if key in read or key in COSMETIC_KEYS or value is None:
            continue
        if key in fixed:
            if not _same(value, fixed[key]):
                raise ModelError(
                    f"config.json: {prefix}{key} is {_shown(value)}; {family} is served with "
                    f"{fixed[key]!r} only",
                    field=prefix + key,
                )
        elif value is not False:
            raise ModelError(
                f"config.json: {prefix}{key} = {_shown(value)} is unknown for {family}: it may change the "
                f"output. Remove the key if it does not",
                field=prefix + key,
            )


def _same(value: Any, expected: Any) -> bool:
    """Null, false and 0 are one value where the default is one of them; a number is not a truth value elsewhere."""
    if not expected:
        return not value
    return bool(value == expected) and isinstance(value, bool) == isinstance(expected, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
