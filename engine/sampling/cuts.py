"""top-k, min-p and top-p, in this order: which tokens of a row a draw chooses from. For all rows of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.base import has_numba
from engine.request import SamplingParams

# How many of a row's largest logits are sorted: at first, and where more may be kept. Where that is not enough, a kernel
# of the CPU selects without sorting; other devices sort all.
_SORTED = (64, 1024)


class Kept(NamedTuple):
    """Candidates of some rows."""

    rows: Tensor  # int64 [rows]: their numbers
    # int64 [rows, candidates], by falling logit, of equals the lower id first; None: all tokens by their ids
    token_ids: Tensor | None
    logits: Tensor  # fp32 [rows, candidates]; -inf where a cut leaves the candidate out


MassOfAll = Callable[[Tensor, Tensor, "_Cuts", Tensor], Tensor]


class _Cuts(NamedTuple):
    """A column each, [rows, 1]."""

    temperature: Tensor  # float64
    top_k: Tensor  # int64; 0 where it cuts nothing
    top_p: Tensor  # float64
    min_p: Tensor  # float64


def has_cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def keep(logits: Tensor, params: Sequence[SamplingParams], temperatures: Sequence[float]) -> Iterator[Kept]:
    """Yields the candidates of every row of `logits`, fp32 [rows, vocab], in groups of rows that needed as many sorted."""

    def column(values: Sequence[float], kind: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=kind, device=logits.device)[:, None]

    cuts = _Cuts(
        column(temperatures, torch.float64),
        column([one.top_k for one in params], torch.int64),
        column([one.top_p for one in params], torch.float64),
        column([one.min_p for one in params], torch.float64),
    )
    rows = torch.arange(logits.shape[0], device=logits.device)
    vocab = logits.shape[1]
    for size in (*(size for size in _SORTED if size < vocab), vocab):
        all_rows = len(rows) == logits.shape[0]
        here, own = (logits, cuts) if all_rows else (logits[rows], _Cuts(*(one[rows] for one in cuts)))
        if size == vocab and logits.device.type == "cpu" and has_numba():
            yield Kept(rows, None, _selected(here, own))
            return
        ids, values, known = _cut(here, own, size)
        yield Kept(rows[known], ids[known], values[known])
        rows = rows[~known]
        if not len(rows):
            return


def keep_largest(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of all rows among their largest: token ids and logits [rows, candidates], as in Kept, and for each row
    whether these are all that the cuts keep. Reads nothing back to the host; columns as in _Cuts."""
    cuts = _Cuts(temperatures, top_k, top_p, min_p)
    return _cut(logits, cuts, min(_SORTED[-1], logits.shape[1]), _mass_of_every_row)


def _selected(logits: Tensor, cuts: _Cuts) -> Tensor:
    """The logits, -inf where a cut leaves a token out: what `_cut` gives for a whole vocabulary."""
    from engine.sampling.cpu_cuts import cut_row

    largest = logits.max(-1, keepdim=True).values
    alone = (cuts.top_k == 0) & (cuts.min_p == 0)
    totals = torch.where(alone, _mass_of_all(logits, largest, cuts, cuts.top_p < 1.0), -1.0)
    kept = torch.empty(logits.shape, dtype=torch.bool)
    columns = (column[:, 0].tolist() for column in (totals, cuts.top_k, cuts.top_p, cuts.min_p))
    for row, asked in enumerate(zip(*columns, strict=True)):
        masses = logits[row].double().sub_(largest[row]).div_(cuts.temperature[row]).exp_()
        cut_row(logits[row].contiguous().numpy(), masses.numpy(), *asked, kept[row].numpy())
    return logits.masked_fill(~kept, float("-inf"))


def _cut(
    logits: Tensor, cuts: _Cuts, size: int, mass_of_all: MassOfAll | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates among the `size` largest: ids, logits, and for each row whether these are all that the cuts keep."""
    values, ids = _sorted(logits, size)
    top_k, min_p = cuts.top_k, cuts.min_p
    mass = ((values.double() - values[:, :1]) / cuts.temperature).exp()
    place = torch.arange(values.shape[1], device=values.device)
    kept = ((top_k == 0) | (place < top_k)) & (mass >= min_p)
    nucleus = cuts.top_p < 1.0
    shortened = (top_k > 0) | (min_p > 0)
    mass = torch.where(kept, mass, 0.0)
    whole = (mass_of_all or _mass_of_all)(logits, values, cuts, nucleus)
    total = torch.where(shortened, mass.sum(-1, keepdim=True), whole)
    before = mass.cumsum(-1) - mass
    left = kept & (~nucleus | (before < cuts.top_p * total) | (place == 0))
    if values.shape[1] == logits.shape[1]:
        known = torch.ones(len(values), dtype=torch.bool, device=values.device)
    else:
        # Tokens that are not sorted are at most the last one that is, and may equal it with a lower id.
        last_is_in_total = nucleus & shortened & kept[:, -1:]
        known = ~(last_is_in_total | (left & (values == values[:, -1:]))).any(-1)
    return ids, torch.where(left, values, float("-inf")), known


def _sorted(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    if size == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk leaves equals in any order: by ids first, then by values, equals as they are
    ids = logits.topk(size, sorted=False).indices.sort(-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _mass_of_all(logits: Tensor, values: Tensor, cuts: _Cuts, nucleus: Tensor) -> Tensor:
    """Sum of the masses of the whole vocabulary, [rows, 1], relative to the largest; for rows with top-p alone."""
    rows = (nucleus & (cuts.top_k == 0) & (cuts.min_p == 0))[:, 0]
    total = torch.zeros_like(cuts.temperature)
    if bool(rows.any()):
        above = (logits[rows] - values[rows, :1]) / cuts.temperature[rows].float()
        total[rows] = above.exp().sum(-1, keepdim=True, dtype=torch.float64)
    return total


def _mass_of_every_row(logits: Tensor, values: Tensor, cuts: _Cuts, nucleus: Tensor) -> Tensor:
    """The same for all rows, without asking which need it."""
    above = (logits - values[:, :1]) / cuts.temperature.float()
    return above.exp().sum(-1, keepdim=True, dtype=torch.float64)
