"""Whether Triton interprets kernels. Importing it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter computes bf16 as integers: operands of products are made fp32 there.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
