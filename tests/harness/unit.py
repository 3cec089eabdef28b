"""Which test modules need neither torch, Ray nor NIXL, judged by their imports, direct and through this tree."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = frozenset(
    {"torch", "ray", "nixl", "nixl_cu12", "nixl_cu13", "numba", "transformers", "vllm", "vllm_flash_attn"}
)
PACKAGES = frozenset(
    {
        "baton",
        "bench",
        "cluster",
        "decode_worker",
        "demo",
        "deploy",
        "engine",
        "kv_transfer",
        "loadgen",
        "prefill_worker",
    }
    | {"router", "tests", "wire", "worker"}
)
# Folders whose tests start whole clusters, or are not part of `make test`.
WHOLE = ("chaos", "end_to_end", "gpu", "system", "bench", "demo")


@cache
def light_modules() -> frozenset[Path]:
    """Test modules, by path, and other modules beside them."""
    tests = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if path.relative_to(ROOT / "tests").parts[0] not in WHOLE
    ]
    return frozenset(path for path in tests if not needed(path) & HEAVY)


def needed(path: Path) -> set[str]:
    """Top-level names of all modules that importing this file imports."""
    names: set[str] = set()
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        if (file := waiting.pop()) in seen:
            continue
        seen.add(file)
        for name in imports(file):
            top = name.partition(".")[0]
            if top in PACKAGES:
                waiting += files(name)
            else:
                names.add(top)
    return names


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Dotted names that the module imports when it is imported itself, those of functions left out."""
    names: list[str] = []
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.Import):
                names += [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
                waiting.append(node)
    return tuple(names)


@cache
def files(name: str) -> tuple[Path, ...]:
    """The module of this name and its packages."""
    parts = name.split(".")
    found = [ROOT.joinpath(*parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
    found.append(ROOT.joinpath(*parts).with_suffix(".py"))
    return tuple(file for file in found if file.is_file())
