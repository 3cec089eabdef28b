"""Attention over prompts on the CPU, in bf16 where it has an instruction for that, else in fp32. That of single tokens is
in engine/ops/cpu/kernels.py."""
