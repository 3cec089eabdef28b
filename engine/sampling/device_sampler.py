"""The sampler on the device: the operations of engine/sampling/sampler.py, in their order, for the whole batch.

    host    rows ─► one copy ─┐                                    ┌─► one copy ─► tokens, logprobs, failed rows
    device                    └─► a fixed number of operations ────┘

Nothing is read back in between, so that the next step can be launched with the tokens before the host has them. top-k,
top-p and min-p are applied to a row's 1,024 largest logits. A row that may keep more than those is drawn again when the
results are read, and is named in `redrawn`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.errors import EngineRequestError, engine_request_error
from engine.sampling import sampler
from engine.sampling.adjust import Changes, adjustments_of, apply
from engine.sampling.cuts import keep, keep_largest
from engine.sampling.draw import draw, largest_sum
from engine.sampling.host_sampler import HostDraw, unsound_rows
from engine.sampling.philox import DrawKey, key_words
from engine.sampling.row import Row, drawn_rows
from engine.sampling.sampler import Result, Sampled
from engine.sampling.transit import Transit

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Batch:
    """The host's record of a step's rows, and their places on the device."""

    rows: Sequence[Row]
    keys: list[DrawKey]  # of now: a row's tokens may grow before its results are read
    failed: dict[int, EngineRequestError]
    whole: list[int]  # rows drawn from all tokens
    cut: list[int]  # rows drawn from those that top-k, top-p and min-p keep
    asked: list[int]  # rows with logprobs
    top: int  # the most logprobs beside the token's own

    @classmethod
    def of(cls, rows: Sequence[Row], failed: dict[int, EngineRequestError], vocab: int) -> _Batch:
        whole, cut = drawn_rows(rows)
        asked = [i for i, row in enumerate(rows) if row.params.logprobs]
        top = min(vocab, max((rows[i].params.top_logprobs for i in asked), default=0))
        return cls(rows, [row.key for row in rows], failed, whole, cut, asked, top)


class _Arrays:
    """Arrays for one copy to the device."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []

    def add(self, numbers: Sequence[float], kind: type) -> None:
        self.append(np.array(numbers, dtype=kind))

    def append(self, array: NDArray[Any]) -> int:
        """Returns its index."""
        self.arrays.append(array)
        return len(self.arrays) - 1


class DeviceDraw:
    """Draws under way. `token_ids`, int64 [rows], is on the device."""

    def __init__(
        self,
        batch: _Batch,
        token_ids: Tensor,
        logprobs: Tensor | None,
        cut_logits: Tensor | None,
        read: Callable[[], list[NDArray[Any]]],
    ):
        self.token_ids = token_ids
        self.redrawn: set[int] = set()
        self.unsound: set[int] = set()
        self._batch = batch
        self._logprobs = logprobs
        self._cut_logits = cut_logits
        self._read = read

    def results(self) -> list[Result]:
        """Wait for the device, and draw again what it could not decide."""
        batch = self._batch
        tokens, finite, sound, excluded, known, own, ids, values = (one.tolist() for one in self._read())
        self.unsound = {i for i in range(len(tokens)) if not sound[i]}
        results: list[Result] = [Sampled(token) for token in tokens]
        for j, i in enumerate(batch.cut):
            if finite[i] and not known[j]:
                self.redrawn.add(i)
                try:
                    results[i] = Sampled(self._again(i, j))
                except Exception as error:  # no memory for a whole row's sort
                    batch.failed[i] = engine_request_error(error)
        for j, i in enumerate(batch.asked):
            count = min(batch.top, batch.rows[i].params.top_logprobs)
            place = slice(j * batch.top, j * batch.top + count)
            results[i] = self._with_logprobs(
                i, j, results[i], own[j], tuple(zip(ids[place], values[place], strict=True))
            )
        for i, row in enumerate(batch.rows):
            if not finite[i]:
                results[i] = sampler.no_maximum(bool(excluded[i]), row)
        for i, reason in batch.failed.items():
            results[i] = reason
        return results

    def _again(self, i: int, j: int) -> int:
        """The token of row i, the j-th of those that are cut, from all that the cuts keep."""
        assert self._cut_logits is not None
        row, key = self._batch.rows[i], self._batch.keys[i]
        temperature = row.scale
        groups = keep(self._cut_logits[j : j + 1], [row.params], [temperature])
        kept = next(one for one in groups if len(one.rows))
        return int(draw(kept.logits, kept.token_ids, [temperature], [key]))

    def _with_logprobs(
        self, i: int, j: int, result: Result, own: float, top: tuple[tuple[int, float], ...]
    ) -> Result:
        assert isinstance(result, Sampled) and self._logprobs is not None
        if i in self.redrawn:
            own = float(self._logprobs[j, result.token_id])
        if np.isfinite(own):
            return Sampled(result.token_id, own, top)
        return sampler.not_finite()


class DeviceSampler:
    def __init__(self, device: torch.device):
        self._device = device
        self._transit = Transit(device)

    def begin(self, logits: Tensor, source: list[int], rows: Sequence[Row]) -> DeviceDraw | HostDraw:
        """Begin to draw one token per row; see engine/sampling/base.py."""
        self._transit.next_step()
        try:
            return self._begin(logits, source, rows)
        except Exception as error:
            if not rows:  # the device itself has failed
                raise
            log.warning("a step's draw failed, each row is drawn alone", exc_info=error)
            results = [
                sampler.sample(logits[s : s + 1], [row])[0] for s, row in zip(source, rows, strict=True)
            ]
            return HostDraw(results, unsound_rows(logits, source, results), self._device)

    def _begin(self, logits: Tensor, source: list[int], rows: Sequence[Row]) -> DeviceDraw:
        adjustments, failed = adjustments_of(rows, logits.shape[1])
        batch, arrays = _Batch.of(rows, failed, logits.shape[1]), _Arrays()
        changes = adjustments.changes(arrays.append) if adjustments else []
        scales = [row.scale for row in rows]
        arrays.add(source, np.int64)
        arrays.add(scales, np.float64)
        arrays.add(batch.asked, np.int64)
        for some in (batch.whole, batch.cut):
            arrays.add(some, np.int64)
            arrays.add([scales[i] for i in some], np.float64)
            arrays.append(key_words([batch.keys[i] for i in some]).astype(np.int64))
        cut = [rows[i].params for i in batch.cut]
        arrays.add([one.top_k for one in cut], np.int64)
        arrays.add([one.top_p for one in cut], np.float64)
        arrays.add([one.min_p for one in cut], np.float64)
        sent = self._transit.send(arrays.arrays)
        placed: Changes[Tensor] = [None if one is None else tuple(sent[i] for i in one) for one in changes]
        own = sent[sum(len(one) for one in changes if one is not None) :]
        return self._launch(logits, source, batch, placed, own)

    def _launch(
        self,
        logits: Tensor,
        source: list[int],
        batch: _Batch,
        changes: Changes[Tensor],
        sent: list[Tensor],
    ) -> DeviceDraw:
        rows, scales, asked, *drawn = sent
        x = logits if source == list(range(logits.shape[0])) else _some(logits, rows)
        logprobs = torch.log_softmax(_some(x, asked), -1) if batch.asked else None
        raw = x.amax(-1) if changes else None
        if changes:
            x = x.clone() if x is logits else x
            apply(x, changes)
        best = x.argmax(-1)  # NaN wins argmax
        largest = x.gather(-1, best[:, None])[:, 0]
        finite = (largest / scales.float()).isfinite()
        chosen, known, cut_logits = self._chosen(x, batch, best, drawn)
        chosen = torch.where(finite, chosen, best)
        none = chosen[:0]
        own, ids, values = none.double(), none, none.double()
        if logprobs is not None:
            own = logprobs.gather(-1, chosen.index_select(0, asked)[:, None]).double()
            if batch.top:
                values, ids = logprobs.topk(batch.top)
                values = values.double()
        sound = (largest if raw is None else raw).isfinite().long()
        excluded = (largest == float("-inf")).long()
        fetched = [chosen, finite.long(), sound, excluded, known, own, ids, values]
        return DeviceDraw(batch, chosen, logprobs, cut_logits, self._transit.fetch(fetched))

    @staticmethod
    def _chosen(
        x: Tensor, batch: _Batch, best: Tensor, sent: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens; for each row that is cut whether its token is decided; the logits of these rows."""
        whole, whole_scales, whole_keys, cut, cut_scales, cut_keys, *cuts = sent
        chosen, known, cut_logits = best, best[:0], None
        if batch.whole:
            tokens = largest_sum(_some(x, whole), None, whole_scales, whole_keys)
            chosen = chosen.index_copy(0, whole, tokens)
        if batch.cut:
            cut_logits = _some(x, cut)
            ids, values, decided = keep_largest(
                cut_logits, cut_scales[:, None], *(one[:, None] for one in cuts)
            )
            chosen = chosen.index_copy(0, cut, largest_sum(values, ids, cut_scales, cut_keys))
            known = decided.long()
        return chosen, known, cut_logits


def _some(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)
