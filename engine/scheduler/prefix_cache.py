"""The full blocks of sequences, found by the hash of the prefix that they end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from cluster.protocol.block_hash import hash_block, hash_blocks, pack_tokens
from engine.cache.block_pool import BlockPool
from engine.request import ChainReport, EngineRequest
from engine.scheduler.sequence import Sequence


class PrefixCache:
    """Matches prompts and registers computed blocks; does neither if not `enabled`. `on_chain` gets every chain that
    has grown; the pool reports those that shrink."""

    def __init__(
        self,
        pool: BlockPool,
        page_size: int,
        on_chain: Callable[[ChainReport], None],
        *,
        secret: bytes,
        enabled: bool,
    ):
        self._pool = pool
        self._page = page_size
        self._on_chain = on_chain
        self._secret = secret
        self._enabled = enabled

    def hashes_of(self, tokens: list[int], request: EngineRequest) -> list[bytes]:
        return hash_blocks(pack_tokens(tokens), self._page, secret=self._secret, salt=request.salt)

    def match(self, hashes: Seq[bytes]) -> list[int]:
        """The blocks that hold the longest cached prefix of `hashes`; adds no references."""
        return self._pool.match(hashes) if self._enabled else []

    def register(self, sequence: Sequence, tokens: int) -> None:
        """Cache every block that the first `tokens` tokens of the sequence fill."""
        full = tokens // self._page
        if full <= sequence.registered_blocks or not self._enabled:
            return
        hashes, salt = sequence.hashes, sequence.request.salt
        while len(hashes) < full:
            block = pack_tokens(sequence.tokens[len(hashes) * self._page : (len(hashes) + 1) * self._page])
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block(parent, block, secret=self._secret, salt=salt))
        for index in range(sequence.registered_blocks, full):
            self._pool.register(sequence.blocks[index], hashes[index], hashes[index - 1] if index else None)
        sequence.registered_blocks = full
        self._on_chain(ChainReport(hashes[:full], full))
