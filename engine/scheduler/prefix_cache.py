"""The full blocks of sequences, found by the hash of the prefix that they end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cluster.protocol.block_hash import hash_block, hash_blocks, pack_tokens
from engine.cache.block_pool import BlockPool
from engine.request import ChainReport, EngineRequest
from engine.scheduler.sequence import Sequence


@dataclass(eq=False)
class PrefixCache:
    """Matches prompts and registers computed blocks; does neither if not `enabled`. `on_chain` gets every chain that
    has grown; the pool reports those that shrink."""

    pool: BlockPool
    page_size: int
    on_chain: Callable[[ChainReport], None]
    secret: bytes = field(repr=False)
    enabled: bool

    def hashes_of(self, tokens: list[int], request: EngineRequest) -> list[bytes]:
        return hash_blocks(pack_tokens(tokens), self.page_size, secret=self.secret, salt=request.salt)

    def match(self, hashes: Seq[bytes]) -> list[int]:
        """The blocks that hold the longest cached prefix of `hashes`; adds no references."""
        return self.pool.match(hashes) if self.enabled else []

    def holds(self, block_hash: bytes) -> bool:
        return self.enabled and self.pool.is_cached(block_hash)

    def register(self, sequence: Sequence, tokens: int) -> None:
        """Cache every block that the first `tokens` tokens of the sequence fill."""
        full = tokens // self.page_size
        if full <= sequence.registered_blocks or not self.enabled:
            return
        hashes, salt = sequence.hashes, sequence.request.salt
        while len(hashes) < full:
            block = pack_tokens(
                sequence.tokens[len(hashes) * self.page_size : (len(hashes) + 1) * self.page_size]
            )
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block(parent, block, secret=self.secret, salt=salt))
        for index in range(sequence.registered_blocks, full):
            self.pool.register(sequence.blocks[index], hashes[index], hashes[index - 1] if index else None)
        sequence.registered_blocks = full
        self.on_chain(ChainReport(hashes[:full], full))
