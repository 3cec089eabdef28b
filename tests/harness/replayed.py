"""What a CUDA graph does, on the CPU: torch's operations are written down once and repeated on the same tensors, with the
numbers that Python had computed then. And the rules of a capture: nothing is read back to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from engine.graphs.base import Recording

aten = torch.ops.aten
# Their result, or its shape, depends on values: on CUDA the host waits for them.
READS = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.allclose.default,
    aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default, aten.argwhere.default,
}  # fmt: skip
# No kernel of their own.
VIEWS = {
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "chunk", "numel",
    "_reshape_alias", "empty", "new_empty", "empty_like", "unfold", "is_same_size", "view_as", "expand_as",
}  # fmt: skip


class HostRead(AssertionError):
    """The captured part read something back to the host, or copied from it."""


class _NoPython(TorchFunctionMode):
    """Methods that give a CPU's numbers to Python without an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.data_ptr):
            raise HostRead(f"{func} in a part that is captured")
        return func(*args, **(kwargs or {}))


class Captured(TorchDispatchMode):
    """Fails on what a capture does not allow, and counts the operations that are a launch on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self._no_python = _NoPython()

    def __enter__(self) -> Self:
        self._no_python.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._no_python.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        masks = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
            isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        moves = func is aten._to_copy.default and kwargs.get("device") is not None
        # lift_fresh makes a tensor of numbers of the host: a copy from memory that is not pinned.
        if func in READS or masks or moves or func is aten.lift_fresh.default:
            raise HostRead(f"{func} in a part that is captured")
        if name not in VIEWS:
            self.launches[name] += 1
        return func(*args, **kwargs)


class Tape(Captured):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        again: dict[int, Tensor] = {}

        def present(one: Any) -> Any:
            return again.get(id(one), one) if isinstance(one, Tensor) else one

        for func, args, kwargs, result in self._calls:
            repeated = func(*tree_map(present, args), **tree_map(present, dict(kwargs)))
            for old, new in zip(tree_flatten(result)[0], tree_flatten(repeated)[0], strict=True):
                again[id(old)] = new


class ReplayRecorder:
    """A Recorder (engine/graphs/base.py) for the CPU."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, function: Callable[[], None]) -> Recording:
        function()
        with Tape() as tape:
            function()
        self.tapes.append(tape)
        return tape


def paged_tokens(**a: Any) -> Tensor:
    """A kernel for VarlenBackend: steps of one token per sequence, by torch's operations alone."""
    q, block_table, lengths = a["q"], a["block_table"], a["seqused_k"]
    assert a["max_seqlen_q"] == 1
    rows, heads, dim = q.shape
    table = block_table.long()
    # [rows, keys, kv_heads, dim]
    keys, values = (one[table].flatten(1, 2) for one in (a["k"], a["v"]))
    at = torch.arange(keys.shape[1])[None]
    seen = at < lengths[:, None]
    if a["window"][0] >= 0:
        seen &= at >= lengths[:, None] - 1 - a["window"][0]
    keys, values = (torch.where(seen[:, :, None, None], one, 0.0) for one in (keys, values))
    grouped = q.view(rows, keys.shape[2], -1, dim)
    scores = torch.einsum("rgqd,rkgd->rgqk", grouped, keys) * a["softmax_scale"]
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("rgqk,rkgd->rgqd", weights, values).reshape(rows, heads, dim)
