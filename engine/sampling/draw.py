"""The draw: the largest of logit / temperature + Gumbel noise (the Gumbel-max trick; Gumbel 1954, Maddison et al. 2014).

A token comes out with its probability under softmax(logit / temperature). Unlike inverse-CDF sampling the draw is stable:
small changes of logits (another batch size, another device, a draft model) change it only where two tokens nearly tie,
not wherever sums of probabilities move. The noise of a token is -log(-log u), u = (word + ½) / 2³², with the token's word
of engine/sampling/philox.py; sums are in double precision. Noise lies within 26 nats, so tokens that far below the
largest are never drawn. Of equal sums the lower token id is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.ops.base import has_numba
from engine.sampling.philox import DrawKey, all_words, key_words, words

_NO_IDS = np.empty((0, 0), dtype=np.int64)


def draw(
    logits: Tensor, token_ids: Tensor | None, temperatures: Sequence[float], keys: Sequence[DrawKey]
) -> Tensor:
    """int64 [rows]: the token drawn from each row.

    `logits` is fp32 [rows, columns]; -inf is never drawn. `token_ids`, int64 of the same shape, names the columns'
    tokens; without it a column is its token. Rows that hold NaN, +inf or nothing but -inf give any number.
    """
    if logits.device.type != "cpu" or not has_numba():
        return draw_by_torch(logits, token_ids, temperatures, keys)
    from engine.sampling.cpu_draw import draw_rows

    chosen = torch.empty(len(keys), dtype=torch.int64)
    draw_rows(
        logits.contiguous().numpy(),
        _NO_IDS if token_ids is None else token_ids.contiguous().numpy(),
        np.array(temperatures, dtype=np.float64),
        key_words(keys),
        chosen.numpy(),
    )
    return chosen


def draw_by_torch(
    logits: Tensor, token_ids: Tensor | None, temperatures: Sequence[float], keys: Sequence[DrawKey]
) -> Tensor:
    """The same for any device; on the CPU the reference of its kernel."""
    device = logits.device
    own = torch.from_numpy(key_words(keys).astype(np.int64)).to(device)
    return largest_sum(logits, token_ids, torch.tensor(temperatures, dtype=torch.float64, device=device), own)


def largest_sum(logits: Tensor, token_ids: Tensor | None, temperatures: Tensor, keys: Tensor) -> Tensor:
    """`draw` with all arguments on the device: temperatures float64 [rows], keys int64 [rows, 5] as `key_words`."""
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)[None]
        noise = all_words(logits.shape[1], keys)
    else:
        noise = words(token_ids, keys)
    uniform = (noise.double() + 0.5) * 2.0**-32
    sums = logits.double() / temperatures[:, None] - (-uniform.log()).log()
    equal = sums == sums.max(-1, keepdim=True).values
    never = torch.iinfo(torch.int64).max
    return torch.where(equal, token_ids.expand(sums.shape), never).min(-1).values
