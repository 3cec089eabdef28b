"""Compiles kernels for cards that are not here: Triton brings ptxas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Largest shared memory of a block in bytes, by compute capability
CARDS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def compile_for(
    capability: int,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
) -> Any:
    """`types`: of the arguments that are no constants, in any order. Fails if the kernel needs more than a card has."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert {name for name, kind in signature.items() if kind == "constexpr"} == set(constants)
    # As the launcher does for tensors and strides that 16 divides
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or name.endswith(("stride", "offset"))
    }
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    assert made.metadata.shared <= CARDS[capability], f"{made.metadata.shared} bytes of shared memory"
    assert made.asm["cubin"]
    return made


def spilled(made: Any, capability: int) -> int:
    """Bytes of registers that lie in memory, as ptxas counts them."""
    import subprocess
    import tempfile
    from pathlib import Path

    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        tool = get_ptxas(capability)
        tool = tool.path if hasattr(tool, "path") else tool[0]
        command = [
            tool,
            "-v",
            f"--gpu-name={sm_arch_from_capability(capability)}",
            str(source),
            "-o",
            "/dev/null",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))
