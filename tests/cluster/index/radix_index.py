"""The radix index in Redis, and a plain model of it."""

from __future__ import annotations

import random
from itertools import count

from cluster.index import scripts
from cluster.protocol.block_hash import hash_blocks, index_keys, make_salt, pack_tokens
from cluster.redis.connect import connect

PAGE = 2
SALT = make_salt("m")
_PROBE = """
local nodes = walk(ARGV[1], ARGV[2], now_ms(), now_ms() + 60000, KEYS[1], 0, tonumber(ARGV[3]), ARGV[4] == "1")
local slots, out = {}, {}
for slot = 1, 99 do slots[slot] = slot end
for slot, blocks in pairs(covered(nodes, slots, now_ms())) do
  out[#out + 1] = tostring(slot)
  out[#out + 1] = blocks
end
return out
"""
_PREDICT = """
local until_ms, expire_at = now_ms() + tonumber(ARGV[5]), now_ms() + 60000
insert(ARGV[1], ARGV[2], {ARGV[3]}, tonumber(ARGV[4]), false, until_ms, expire_at, nil, false, ARGV[6] == "1")
return 1
"""


def chain(tokens: list[int]) -> tuple[bytes, ...]:
    packed = index_keys(hash_blocks(pack_tokens(tokens), PAGE, secret=b"s", salt=SALT))
    return tuple(packed[i : i + 8] for i in range(0, len(packed), 8))


class Index:
    """The real thing, in Redis."""

    _numbers = count()

    def __init__(self, url: str):
        self.redis = connect(url)
        name = f"index-{next(self._numbers)}-{random.random()}"
        self.prefix, self.owners, self.sequences = f"{{{name}}}:m:", f"{{{name}}}:owners", f"{{{name}}}:seq"
        self._probe = self.redis.register_script(scripts.walk() + _PROBE)
        self._predict = self.redis.register_script(scripts.tree() + _PREDICT)
        self._report = self.redis.register_script(scripts.report())
        self._sequence: dict[str, int] = {}

    def own(self, slot: str) -> None:
        self.redis.hset(self.owners, slot, f"w{slot}@1")

    def report(
        self, slot: str, blocks: tuple[bytes, ...], held: int, sequence: int | None = None
    ) -> bytes | int:
        number = self._sequence.get(slot, 1) if sequence is None else sequence
        answer = self._report(
            keys=[self.owners, self.sequences],
            args=[self.prefix, slot, f"w{slot}@1", number, 60000, held, b"".join(blocks)],
        )
        if answer == b"ok" and sequence is None:
            self._sequence[slot] = number + 1
        return answer

    def predict(
        self, slot: str, blocks: tuple[bytes, ...], until_ms: int = 60000, *, unreported: bool = False
    ) -> None:
        arguments: list[bytes | str | int] = [
            self.prefix,
            b"".join(blocks),
            slot,
            len(blocks),
            until_ms,
            int(unreported),
        ]
        self._predict(args=arguments)

    def match(self, blocks: tuple[bytes, ...], *, unreported: bool = False) -> dict[str, int]:
        """Whether nodes are read whole or slot by slot. `unreported`: only predictions count."""
        whole, by_slot = (self._match(blocks, wide, unreported) for wide in (1000, 1))
        assert whole == by_slot
        return whole

    def _match(self, blocks: tuple[bytes, ...], wide: int, unreported: bool) -> dict[str, int]:
        arguments: list[bytes | str | int] = [self.prefix, b"".join(blocks), wide, int(unreported)]
        answer = self._probe(keys=[self.owners], args=arguments)
        found = {answer[i].decode(): int(answer[i + 1]) for i in range(0, len(answer), 2)}
        return {slot: blocks for slot, blocks in found.items() if blocks}


class Sets:
    """The model: which block hashes each slot holds."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}

    def report(self, slot: str, blocks: tuple[bytes, ...], held: int) -> None:
        mine = self.held.setdefault(slot, set())
        mine |= set(blocks[:held])
        mine -= set(blocks[held:])

    def match(self, blocks: tuple[bytes, ...]) -> dict[str, int]:
        found = {}
        for slot, mine in self.held.items():
            covered = 0
            while covered < len(blocks) and blocks[covered] in mine:
                covered += 1
            if covered:
                found[slot] = covered
        return found
