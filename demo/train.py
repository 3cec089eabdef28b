"""Trains the demo model: a byte-level BPE tokenizer and a Llama of 8 M parameters, on one CPU core.

python -m demo.train --minutes 80 --out demo/model
"""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from demo.corpus import Corpus, read

VOCAB = 4096
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_END = 1, 2, 4
LENGTH, LONG_LENGTH = 512, 1024  # every fifth batch is long, so that later positions are seen too
BATCH = 8
PEAK_RATE, WARMUP_STEPS, FLOOR = 2e-3, 100, 0.05
Tokens = NDArray[np.int32]


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    """One long row: every text between <|bos|> and <|eos|>."""
    rows = [[BOS, *encoding.ids, EOS] for encoding in tokenizer.encode_batch(texts)]
    return np.array([token for row in rows for token in row], dtype=np.int32)


# demo: shipped. bench: 46 MB of bf16, to measure what formats cost (bench/sections/quality.py).
SIZES: dict[str, dict[str, Any]] = {
    "demo": {
        "hidden_size": 320,
        "intermediate_size": 896,
        "num_hidden_layers": 6,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "bench": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}


def make_model(size: str = "demo") -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        **SIZES[size],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=[EOS, IM_END],
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean nats per token; rows int64 [batch, length + 1]. Products run in bf16, the loss in fp32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows[:, :-1]).logits
    return F.cross_entropy(logits.float().view(-1, VOCAB), rows[:, 1:].reshape(-1))


@torch.no_grad()
def evaluate(model: Any, held_out: Tokens, windows: int = 60) -> float:
    losses = []
    for begin in range(0, min(len(held_out) - LENGTH - 1, LENGTH * windows), LENGTH):
        row = torch.from_numpy(held_out[begin : begin + LENGTH + 1].astype(np.int64))
        losses.append(float(loss_of(model, row[None])))
    return sum(losses) / len(losses)


def batch_at(step: int, tokens: Tokens) -> torch.Tensor:
    """The same batch at the same step of every run."""
    length, size = (LONG_LENGTH, BATCH // 2) if step % 5 == 0 else (LENGTH, BATCH)
    starts = np.random.default_rng(step).integers(0, len(tokens) - length - 1, size)
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64))


def rate_at(step: int, done: float) -> float:
    """Warm-up, then half a cosine down to a twentieth."""
    wave = 0.5 * (1 + math.cos(math.pi * done))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (FLOOR + (1 - FLOOR) * wave)


def fit(model: Any, tokens: Tokens, minutes: float, console: Console) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    began, step, smooth = time.monotonic(), 0, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=1.0)
        while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, done)
            loss = loss_of(model, batch_at(step, tokens))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            smooth = float(loss) if step == 1 else 0.97 * smooth + 0.03 * float(loss)
            rate = step * BATCH * LENGTH / (time.monotonic() - began)
            progress.update(
                task, completed=done, description=f"step {step}  loss {smooth:.3f}  {rate:,.0f} tok/s"
            )


def main(
    minutes: Annotated[float, typer.Option(help="How long to train.")] = 80.0,
    out: Annotated[Path, typer.Option(help="Where the model directory is written.")] = Path("out/demo-model"),
    seed: Annotated[int, typer.Option(help="Of the weights and the corpus.")] = 0,
    size: Annotated[Literal["demo", "bench"], typer.Option(help="8 M or 23 M parameters.")] = "demo",
) -> None:
    """Train the demo model again."""
    console = Console()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    corpus: Corpus = read(seed)
    tokenizer = make_tokenizer(corpus.train)
    tokens, held_out = encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out)
    model = make_model(size)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{count / 1e6:.1f} M parameters, {len(tokens):,} tokens, {len(held_out):,} held out")
    fit(model, tokens, minutes, console)
    loss = evaluate(model, held_out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    per_token = sum(len(text.encode()) for text in corpus.held_out) / len(held_out)
    console.print(
        f"held-out loss {loss:.3f} nats per token, {loss / math.log(2) / per_token:.3f} bits per byte"
    )


if __name__ == "__main__":
    typer.run(main)
