"""Which digest a part carries: each pair has agreed on how many parts do, and on the kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.config import TransferConfig
from kv_transfer.digest import NONE, SUM64, XXH3_128, Digests
from kv_transfer.messages import OpenTransfer


def kinds_on(device: torch.device) -> Sequence[str]:
    """That can be computed where the KV is, in order of preference."""
    return (XXH3_128, SUM64) if device.type == "cpu" else (SUM64,)


class PairDigests:
    def __init__(self, device: torch.device, config: TransferConfig):
        """`config.digests` holds for a pair that has agreed on nothing."""
        self._device = device
        self._config = config
        self._by_setting: dict[str, Digests] = {}

    def kind_of(self, opened: OpenTransfer, source_rank: int, target_rank: int, part: int) -> str:
        setting = opened.digests or self._config.digests
        if setting not in self._by_setting:
            self._by_setting[setting] = Digests(self._device, setting, self._config.digest_sample_share)
        own = self._by_setting[setting].kind_of(opened.transfer_id, source_rank, target_rank, part)
        return own if own == NONE else opened.digest_kind or own
