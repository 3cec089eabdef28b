"""What the CPU's kernels are made of: compilation by numba and its cache on disk, LLVM instructions, elements in memory,
AMX's tile registers. Nothing here knows a kernel."""
