"""Which digest a part carries, by the setting and kind that its pair has agreed on."""

from __future__ import annotations

import torch

from cluster.config.worker import TransferConfig
from kv_transfer.layout.digest import Digests
from kv_transfer.messages import OpenTransfer


class PairDigests:
    def __init__(self, device: torch.device, config: TransferConfig):
        """`config.digests` applies to pairs without an agreement."""
        self._device = device
        self._config = config
        self._agreed: dict[tuple[str, str], Digests] = {}

    def kind_of(self, opened: OpenTransfer, source_rank: int, target_rank: int, part: int) -> str:
        agreed = (opened.digests or self._config.digests, opened.digest_kind)
        if agreed not in self._agreed:
            mode, kind = agreed
            self._agreed[agreed] = Digests(self._device, mode, self._config.digest_sample_share, kind)
        return self._agreed[agreed].kind_of(opened.transfer_id, source_rank, target_rank, part)
