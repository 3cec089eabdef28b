"""What the workers under test compute with, and how near to the reference their tokens then are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.harness.checkpoints import make_checkpoint
from tests.harness.exactness import GAP

# Logits of the checkpoint computed in bf16 with KV in int8 differ from those of the reference by 0.21 root mean square
# (their own is 8.2), single ones by up to 2.7. The largest distance that turned one token into another was 1.2 in 1,500
# tokens without faults, and 3.1 in 470,000 tokens of a run with 170 faults. A random token is 20 behind the best one.
MIXED_GAP = 4.0
# Of all tokens, those that the reference itself would give; 0.945 to 0.964 were measured without faults.
MIN_SAME = 0.9


@dataclass(frozen=True)
class Form:
    """`mixed`: bf16 with its KV in int8 at decode workers; else everything in fp32."""

    prefill_ranks: int = 1
    decode_ranks: int = 1
    mixed: bool = False

    @property
    def ranks(self) -> dict[str, int]:
        """By role."""
        return {"prefill": self.prefill_ranks, "decode": self.decode_ranks}

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `baton up`. A decode worker gets about 256 blocks: too few for all streams when the other one dies."""
        ranks = ("--prefill-tp", str(self.prefill_ranks), "--decode-tp", str(self.decode_ranks))
        if self.mixed:
            return (*ranks, "--dtype", "bfloat16", "--kv-dtype", "bf16>int8", "--kv-memory", "800KiB")
        return (*ranks, "--dtype", "float32", "--kv-memory", f"{3072 // self.decode_ranks}KiB")

    @property
    def gap(self) -> float:
        """The difference of logits below which the reference counts as undecided."""
        return MIXED_GAP if self.mixed else GAP

    @property
    def least_same(self) -> float:
        """The least share of all tokens that equals the reference's."""
        return MIN_SAME if self.mixed else 0.0

    def checkpoint(self, path: Path) -> Path:
        """Write the model into `path`, with weights that workers load without rounding."""
        return make_checkpoint(path, dtype=torch.bfloat16 if self.mixed else torch.float32)
