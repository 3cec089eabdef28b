"""Attention on the CPU by plain matrix products, per sequence.

Measured on two EPYC cores (bf16, 16 heads, 8 KV heads of 64): 2,048 causal tokens take 44 ms this way and 117 ms by
torch's fused kernel, because oneDNN's bf16 products run at the GEMM rate; the GQA group is folded into the query
rows (`enable_gqa` is 7 times slower), and keys are gathered into one buffer that is used again and again (a fresh
large tensor costs page faults).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine import kv_blocks
from engine.attention.base import AttentionShape
from engine.ops.team import Team
from engine.step_buffers import Chunk, StepBuffers

QUERY_BLOCK = 256  # rows of one product: one head's scores stay in the second-level cache


@dataclass(frozen=True)
class _Span:
    """One sequence's rows in the step."""

    rows: slice
    begin: int
    end: int
    blocks: Tensor | None  # int32; None: a whole prompt, whose keys are arguments of `attend`

    @property
    def is_token(self) -> bool:
        return self.end - self.begin == 1


@dataclass(frozen=True)
class Piece:
    """A block of queries and the keys that they may see."""

    rows: slice
    keys: slice
    offset: int  # the first row's position among `keys`
    window: int


class SdpaBackend:
    name = "sdpa"
    capturable = False

    def __init__(self, shape: AttentionShape, kv_cache: Tensor, team: Team):
        self._shape = shape
        self._cache = kv_cache
        self._team = team
        self._scale = shape.softmax_scale
        self._group = shape.num_heads // shape.num_kv_heads
        self._spans: list[_Span] = []
        self._dtype = shape.dtype or kv_cache.dtype
        self._pages = kv_cache.new_empty(0)
        self._flat = kv_cache.new_empty(0, dtype=self._dtype)
        # Of this step: all its layers need the same few.
        self._masks: dict[tuple[int, int, int, int], Tensor] = {}

    def begin(self, step: StepBuffers) -> None:
        page = self._shape.page_size
        self._spans, longest = [], 0
        self._masks.clear()
        for chunk in self._chunks(step):
            blocks = None
            if chunk.begin > 0 or chunk.is_token:
                used = -(-chunk.end // page)
                longest = max(longest, used)
                blocks = step.table[chunk.row, :used]
            self._spans.append(_Span(chunk.tokens, chunk.begin, chunk.end, blocks))
        if longest > self._pages.shape[0]:
            self._pages = self._cache.new_empty(longest + 64, *self._cache.shape[2:])
            tokens = (longest + 64) * page
            self._flat = self._flat.new_empty(2 * self._shape.num_kv_heads * tokens * self._shape.head_dim)

    def _chunks(self, step: StepBuffers) -> list[Chunk]:
        """The chunks that are computed here, one after the other."""
        return step.chunks + step.single_chunks()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._attend_tokens(layer, q, out)
        if self._spans:
            self._attend_spans(layer, q, k, v, out)
        return out.view(q.shape[0], -1)

    def _attend_tokens(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attention of single tokens, for backends that compute them separately."""

    def _attend_spans(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        window, sinks = self._shape.windows[layer], self._sinks(layer)
        for span in self._spans:
            rows = span.rows
            if span.blocks is None:
                keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
            else:
                keys, values = self._gather(layer, span.blocks, span.end)
            if span.is_token:
                masked = window and span.end > window
                mask = self._mask(1, span.end, span.end - 1, window) if masked else None
                self._attend_token(q[rows] * self._scale, keys, values, mask, out[rows], sinks)
            else:
                self._attend_prompt(q[rows], keys, values, span.begin, window, out[rows], sinks)

    def _sinks(self, layer: int) -> Tensor | None:
        """float32 [kv_heads, group]; None where the model has none."""
        sinks = self._shape.sinks
        return None if sinks is None else sinks[layer].view(self._shape.num_kv_heads, self._group)

    def _gather(self, layer: int, blocks: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end, dim], in buffers that are reused by later calls.

        Of the last block only the sequence's own tokens are copied: the rest may hold a former request's NaN, and
        0 · NaN is NaN.
        """
        s, whole, rest = self._shape, end // self._shape.page_size, end % self._shape.page_size
        pages = self._pages[: blocks.shape[0]]
        torch.index_select(self._cache[:, layer], 0, blocks, out=pages)
        both = self._flat[: 2 * s.num_kv_heads * end * s.head_dim].view(2, s.num_kv_heads, end, s.head_dim)
        if whole:
            filled = both[:, :, : end - rest].view(2, s.num_kv_heads, whole, s.page_size, s.head_dim)
            filled.copy_(kv_blocks.read(pages[:whole], self._dtype).permute(1, 2, 0, 3, 4))
        if rest:
            both[:, :, end - rest :] = kv_blocks.read(pages[whole], self._dtype)[:, :, :rest]
        return both[0], both[1]

    def _attend_token(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """One query row: all KV heads in one product, the queries of a group as rows. A window is a mask over all keys: a
        slice would copy keys and values."""
        s = self._shape
        shape = (s.num_kv_heads, self._group, s.head_dim)
        scores = self._capped(torch.bmm(q.view(shape), keys.transpose(1, 2)))
        if mask is not None:
            scores.add_(mask)
        weights = _softmax(scores, None if sinks is None else sinks[..., None])
        torch.bmm(weights, values, out=out.view(shape))

    def _attend_prompt(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        begin: int,
        window: int,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Head by head and block by block of queries, each against the keys it may see.

        Half of the square is never computed, and a slice of one head's keys is a plain matrix: a batched product
        over slices would clone them first (a tenth of the time, measured).
        """
        s, count = self._shape, q.shape[0]
        keys, values = keys.contiguous(), values.contiguous()
        grouped = (count, s.num_kv_heads, self._group, s.head_dim)
        scaled = (q * self._scale).view(grouped)  # once, not for every product
        queries, mixed = scaled.permute(1, 2, 0, 3).contiguous(), out.view(grouped)
        pieces = [
            self._piece(row, min(row + QUERY_BLOCK, count), begin, window)
            for row in range(0, count, QUERY_BLOCK)
        ]

        def heads(first: int, last: int) -> None:
            for head in range(first, last):
                for piece in pieces:
                    block = queries[head, :, piece.rows].reshape(-1, s.head_dim)
                    scores = self._capped(torch.mm(block, keys[head, piece.keys].t()))
                    weights = self._weights(scores, piece, None if sinks is None else sinks[head])
                    product = torch.mm(weights, values[head, piece.keys])
                    mixed[piece.rows, head] = product.view(self._group, -1, s.head_dim).transpose(0, 1)

        self._team.split_torch(s.num_kv_heads, heads)

    def _capped(self, scores: Tensor) -> Tensor:
        """May work in place."""
        cap = self._shape.cap
        return scores.div_(cap).tanh_().mul_(cap) if cap else scores

    @staticmethod
    def _piece(row: int, stop: int, begin: int, window: int) -> Piece:
        first, last = begin + row, begin + stop
        low = max(0, first - window + 1) if window else 0
        return Piece(slice(row, stop), slice(low, last), first - low, window)

    def _weights(self, scores: Tensor, piece: Piece, sinks: Tensor | None) -> Tensor:
        """Softmax over the keys that each row of [group · rows, keys] may see; scores may be overwritten. `sinks`
        [group]: those of its heads."""
        # Without a window only the last square of keys has something to hide.
        masked = 0 if piece.window else piece.offset
        rows = piece.rows.stop - piece.rows.start
        scores[:, masked:] += self._mask(rows, scores.shape[1] - masked, piece.offset - masked, piece.window)
        return _softmax(scores, None if sinks is None else sinks.repeat_interleave(rows)[:, None])

    def _mask(self, rows: int, keys: int, offset: int, window: int) -> Tensor:
        """[group · rows, keys]: 0 for the keys visible to row i (at position offset + i of the keys), else -inf."""
        key = (rows, keys, offset, window)
        if key not in self._masks:
            at = torch.arange(rows, device=self._cache.device)[:, None] + offset
            to = torch.arange(keys, device=self._cache.device)[None, :]
            hidden = to > at
            if window:
                hidden |= to <= at - window
            mask = self._flat.new_zeros(rows, keys).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat(self._group, 1)
        return self._masks[key]


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension. `sinks` [..., 1]: a further logit of each row, whose weight is left out of the
    result."""
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)), -1), -1)[..., :-1]
