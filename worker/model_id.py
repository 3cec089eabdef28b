"""The model id: workers exchange KV and share prefixes only if theirs are equal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engine.build import compute_dtype
from engine.model.config import ModelConfig
from engine.model.weights import tensor_files
from worker import weights_digest

# Keys of config.json that do not change the engine's output: notes, training settings, generation defaults (applied by the
# router), and dtypes and end tokens, which are hashed as resolved. Any other key, known or not, changes the id.
_COSMETIC_KEYS = frozenset({
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "auto_map",
    "transformers_version", "transformers.js_config", "task_specific_params", "finetuning_task", "problem_type",
    "id2label", "label2id", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "return_dict_in_generate", "output_scores", "torchscript", "use_bfloat16", "pretraining_tp", "gradient_checkpointing",
    "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "classifier_dropout",
    "router_aux_loss_coef", "output_router_logits", "tokenizer_class", "prefix",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "do_sample", "num_beams", "num_beam_groups", "max_length",
    "min_length", "max_new_tokens", "repetition_penalty", "length_penalty", "diversity_penalty", "early_stopping",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "dtype", "torch_dtype", "eos_token_id",
})  # fmt: skip


def make_model_id(model: Path, dtype: str = "auto") -> str:
    """The model id of the checkpoint in `model`, computed in `dtype`: equal ids mean equal output.

    Raises ModelError naming the key or the file.
    """
    config = ModelConfig.read(model)
    raw = json.loads((model / "config.json").read_text())
    facts = {key: value for key, value in raw.items() if key not in _COSMETIC_KEYS and value is not None}
    resolved = {"compute": compute_dtype(dtype, config.dtype), "eos": sorted(config.eos_token_ids)}
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps([facts, resolved], sort_keys=True).encode())
    for sample in weights_digest.samples(tensor_files(model)):
        digest.update(sample)
    return f"{model.name}-{digest.hexdigest()}"
