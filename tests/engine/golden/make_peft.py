"""Writes `peft/`: adapters that peft 0.21.2 saved, and what each adds to its modules' weights when peft merges it.

Not run by the tests, which have no such package: `python make_peft.py` in an environment with it and transformers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

# That of the checkpoint `llama` of tests/harness/checkpoints.py
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PATTERNS: dict[str, Any] = {
    "rank_pattern": {"layers.1.self_attn.q_proj": 2},
    "alpha_pattern": {"v_proj": 3, "model.layers.2.mlp.down_proj": 9},
}
HOW: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **PATTERNS},
    "stable": {
        "r": 5,
        "lora_alpha": 6,
        "target_modules": r".*\.[12]\..*(q|down)_proj",
        "use_rslora": True,
        **PATTERNS,
    },
}


def main(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for number, (name, how) in enumerate(HOW.items()):
        torch.manual_seed(number)
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **how))
        for part, parameter in model.named_parameters():
            if "lora_B" in part:
                parameter.data.normal_(0.0, 0.1)
        model.save_pretrained(target / name)
        (target / name / "README.md").unlink()
        added = {
            f"{part.removeprefix('base_model.model.')}.weight": module.get_delta_weight(
                "default"
            ).contiguous()
            for part, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }
        save_file(added, target / name / "added.st")


if __name__ == "__main__":
    main(Path(__file__).with_name("peft"))
