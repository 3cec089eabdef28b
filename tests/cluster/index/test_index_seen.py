"""A placement tells an insert which nodes it has read: the tree becomes the same as without that."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.index import scripts
from cluster.redis.connect import connect
from tests.cluster.index.radix_index import PAGE, chain

LATER = 4_000_000_000_000  # ms since 1970
_PLACE = """
local seen
if ARGV[5] == 'seen' then
  local _
  _, seen = walk(ARGV[1], ARGV[2], 0, false, KEYS[1], tonumber(ARGV[6]), tonumber(ARGV[7]))
end
local slots = {}
for slot in string.gmatch(ARGV[3], '%d+') do slots[#slots + 1] = slot end
insert(ARGV[1], ARGV[2], slots, #ARGV[2] / 8, false, tonumber(ARGV[4]), tonumber(ARGV[4]), seen, seen ~= nil)
"""
_REPORT = """
insert(ARGV[1], ARGV[2], {ARGV[3]}, tonumber(ARGV[4]), true, 0, tonumber(ARGV[5]))
"""
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda blocks: chain([token for token in blocks for _ in range(PAGE)])
)
SLOTS = st.integers(1, 4)
STEPS = st.one_of(
    st.tuples(st.just("place"), PROMPTS, SLOTS, SLOTS, st.sampled_from([1, 1000])),
    st.tuples(st.just("report"), PROMPTS, SLOTS, st.integers(0, 6), st.just(0)),
    st.tuples(st.just("evict"), PROMPTS, SLOTS, SLOTS, st.just(0)),
)


class Twin:
    """Two trees in one Redis, of which one is told what was read."""

    def __init__(self, url: str, namespace: str):
        self.redis = connect(url)
        self.owners = f"{{{namespace}}}:owners"
        self.trees = {told: f"{{{namespace}}}:{told}:" for told in ("seen", "not")}
        self._place = self.redis.register_script(scripts.walk() + _PLACE)
        self._report = self.redis.register_script(scripts.tree() + _REPORT)

    def clear(self) -> None:
        for key in self.redis.scan_iter(self.owners[:-6] + "*"):
            self.redis.delete(key)

    def place(self, blocks: tuple[bytes, ...], slots: str, now: int, budget: int, wide: int) -> None:
        for told, prefix in self.trees.items():
            arguments: list[Any] = [prefix, b"".join(blocks), slots, LATER + now, told, budget, wide]
            self._place(keys=[self.owners], args=arguments)

    def report(self, blocks: tuple[bytes, ...], slot: int, held: int) -> None:
        for prefix in self.trees.values():
            self._report(args=[prefix, b"".join(blocks), slot, min(held, len(blocks)), LATER])

    def evict(self, block: bytes) -> None:
        """The holders of a node, as a full Redis does."""
        for prefix in self.trees.values():
            self.redis.delete(prefix.encode() + b"w:" + block)

    def tree(self, told: str) -> dict[bytes, Any]:
        found: dict[bytes, Any] = {}
        prefix = self.trees[told].encode()
        for key in self.redis.scan_iter(prefix + b"*", count=1000):
            assert self.redis.pttl(key) > 0, f"{key!r} never expires"
            name = key[len(prefix) :]
            found[name] = self.redis.get(key) if name.startswith(b"n:") else self.redis.hgetall(key)
        return found


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=1, max_size=15))
def test_what_was_read_changes_nothing_that_is_written(steps, redis_url, namespace):
    twin = Twin(redis_url, namespace)
    for number, (kind, blocks, one, other, wide) in enumerate(steps):
        if kind == "place":
            twin.place(blocks, f"{one} {other}", number, 0, wide)
        elif kind == "report":
            twin.report(blocks, one, other)
        else:
            twin.evict(blocks[one % len(blocks)])
    assert twin.tree("seen") == twin.tree("not")
    twin.clear()


def test_a_node_whose_last_slot_the_walk_has_swept_gets_a_time_to_live_again(redis_url, namespace):
    twin = Twin(redis_url, namespace)
    blocks = chain([0] * 2 * PAGE)
    twin.report(blocks, 1, 2)
    twin.place(blocks, "2", 0, 16, 1000)  # slot 1 has no owner
    (holders,) = [held for key, held in twin.tree("seen").items() if key.startswith(b"w:")]
    assert set(holders) == {b"2", b"c"}
