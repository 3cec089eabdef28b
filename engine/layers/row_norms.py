"""RMS norms over all heads of a token's queries, and of its keys, whose heads several ranks share."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.parallel.group import TpGroup


class RowNorms:
    """The product for queries, keys and values, with the first two normed."""

    def __init__(self, product: Linear, weights: tuple[Tensor, Tensor], eps: float, group: TpGroup):
        """`weights`: of this rank's queries and keys."""
        self._product, self._weights, self._eps, self._group = product, weights, eps, group
        q, k = (len(one) for one in weights)
        self._q, self._k = slice(0, q), slice(q, q + k)
        # Ranks have equal shares; a KV head that several hold is counted by each of them.
        self._counted = weights[0].new_tensor((q * group.size, k * group.size), dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        out = self._product(x)
        parts = (out[:, self._q], out[:, self._k])
        squares = torch.stack([part.float().square().sum(-1) for part in parts], -1)
        scales = torch.rsqrt(self._group.all_reduce(squares) / self._counted + self._eps)
        for index, (part, weight) in enumerate(zip(parts, self._weights, strict=True)):
            part.copy_(part.float() * scales[:, index : index + 1] * weight.float())
        return out
