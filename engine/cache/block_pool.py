"""Blocks of the KV cache: reference counts, an LRU free list, and the prefix cache over them.

    allocated  reference count > 0
    free       reference count 0; keeps its hash and contents until it is allocated again (then it is evicted)

free + allocated = total, always. An allocated block is charged to the tenant whose `allocate` or `retain` took its count
from 0, until it is 0 again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from cluster.errors import BlocksExhaustedError
from engine.cache.evicted_chains import Evicted, EvictedChains


class BlockPool:
    """`on_evicted(chain, held)`: of the prefix chain (hashes from the root) only the first `held` blocks are cached."""

    def __init__(self, num_blocks: int, on_evicted: Evicted = lambda chain, held: None):
        self._refs = [0] * num_blocks
        self._payer: list[str | None] = [None] * num_blocks
        self.charged: Counter[str] = Counter()  # blocks by tenant; no zeros
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._parent: dict[bytes, bytes | None] = {}
        # Least recently used first: the next to be allocated. Blocks without a hash come before all cached ones.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_cached = 0  # of these, blocks with a hash
        self._evicted = EvictedChains(self._parent, on_evicted)

    @property
    def total(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_uncached(self) -> int:
        """How many can be allocated without evicting a prefix."""
        return len(self._free) - self._free_cached

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest cached prefix of `hashes`; adds no references."""
        return list(iter(map(self._block_of.get, hashes).__next__, None))

    def is_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._block_of

    def free_among(self, blocks: Iterable[int]) -> int:
        return sum(map(self._free.__contains__, blocks))

    def retain(self, blocks: Iterable[int], tenant: str = "") -> None:
        """Add a reference to each block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
                self._free_cached -= self._hash_of[block] is not None
                self._payer[block] = tenant
                self.charged[tenant] += 1
            self._refs[block] += 1

    def allocate(self, count: int, tenant: str = "") -> list[int]:
        """`count` blocks to write to, one reference each. Raises BlocksExhaustedError and allocates none."""
        if count > len(self._free):
            raise BlocksExhaustedError(
                f"{count} KV blocks are needed, {len(self._free)} are free", retry_after_seconds=0.05
            )
        allocated = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._uncache(block)
            self._refs[block] = 1
            self._payer[block] = tenant
            allocated.append(block)
        if count > 0:
            self.charged[tenant] += count
        self._evicted.report()
        return allocated

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block. The tail of a prefix is freed first, so that it is evicted first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self._free_cached += 1
                self._uncharge(block)

    def _uncharge(self, block: int) -> None:
        tenant = self._payer[block]
        assert tenant is not None, "a block that is held is charged"
        self._payer[block] = None
        self.charged[tenant] -= 1
        if not self.charged[tenant]:
            del self.charged[tenant]

    def shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def register(self, block: int, block_hash: bytes, parent: bytes | None) -> bool:
        """Cache the block under the hash of its prefix. False if another block is: one copy is enough."""
        if block_hash in self._block_of:
            return False
        self._uncache(block)
        self._evicted.report()
        self._evicted.registered(block_hash)
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self._parent[block_hash] = parent
        return True

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Remove these blocks of a sequence, first to last, from the prefix cache, and all cached blocks behind them,
        which were computed from them. References stay."""
        behind: dict[bytes, list[bytes]] = {}
        for block_hash, parent in self._parent.items():
            if parent is not None:
                behind.setdefault(parent, []).append(block_hash)
        invalid: dict[bytes, None] = {}  # every hash after the one before it
        pending = [found for block in blocks if (found := self._hash_of[block]) is not None][::-1]
        while pending:
            block_hash = pending.pop()
            if block_hash not in invalid:
                invalid[block_hash] = None
                pending += behind.get(block_hash, ())
        for block_hash in reversed(invalid):  # tails first, the order of reports
            block = self._block_of[block_hash]
            self._uncache(block)
            if block in self._free:
                self._free.move_to_end(block, last=False)
        self._evicted.report()

    def chains(self) -> list[list[bytes]]:
        """Every cached prefix that is not the beginning of a longer one."""
        inner = {parent for parent in self._parent.values() if parent is not None}
        chains = [self._chain(leaf) for leaf in self._block_of if leaf not in inner]
        return [chain for chain in chains if chain]

    def _chain(self, block_hash: bytes) -> list[bytes]:
        """Hashes from the root to the block; empty if an earlier block is not cached."""
        chain: list[bytes] = []
        node: bytes | None = block_hash
        while node is not None:
            if node not in self._parent:
                return []
            chain.append(node)
            node = self._parent[node]
        return chain[::-1]

    def _uncache(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._evicted.evicted(block_hash)
            self._hash_of[block] = None
            self._free_cached -= self._refs[block] == 0
            del self._block_of[block_hash]
            del self._parent[block_hash]

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """`references`: for each block, the number of sequences that hold it."""
        held = sum(count > 0 for count in self._refs)
        assert held + len(self._free) == self.total, f"{held} held + {len(self._free)} free != {self.total}"
        assert all(self._refs[block] == 0 for block in self._free), "a free block has references"
        cached = sum(self._hash_of[block] is not None for block in self._free)
        assert self._free_cached == cached, f"{self._free_cached} free blocks counted as cached, not {cached}"
        for block, count in enumerate(self._refs):
            owners = references.get(block, 0)
            assert count == owners, f"block {block} has {count} references, and {owners} holders"
        charged = Counter(tenant for tenant in self._payer if tenant is not None)
        assert self.charged == charged and len(self.charged) == len(charged), (
            "charges differ from a full count"
        )
        unequal = [b for b, count in enumerate(self._refs) if (count > 0) != (self._payer[b] is not None)]
        assert not unequal, f"free and charged, or held and not: {unequal}"
        assert all(self._hash_of[block] == h for h, block in self._block_of.items()), "hash table broken"
