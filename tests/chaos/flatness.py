"""Growth of every process at rest: the second quarter of a run against its last."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.chaos.samples import Sample

RSS_SHARE, RSS_BYTES = 0.05, 12 << 20  # allocators keep freed memory for a while
COUNT_SHARE, COUNT = 0.05, 6
REDIS_SHARE, REDIS_BYTES = 0.10, 2 << 20


@dataclass(frozen=True)
class Finding:
    """`before` and `after` are medians; `allowed` is what `after` may be at most."""

    what: str
    before: float
    after: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.after <= self.allowed


def judge_flatness(samples: Sequence[Sample]) -> list[Finding]:
    """Of each process that was there in both quarters, of Redis, and of the accounts."""
    rest = [sample for sample in samples if sample.at_rest]
    end = samples[-1].seconds if samples else 0.0
    before = [sample for sample in rest if end / 4 <= sample.seconds < end / 2]
    after = [sample for sample in rest if sample.seconds >= 3 * end / 4]
    if not before or not after:
        return [Finding("samples at rest in both quarters", 1, 0, -1)]
    findings = []
    for name in sorted(before[0].rss_bytes):
        of_process: list[tuple[str, Callable[[Sample], float | None], float, float]] = [
            ("rss", _of("rss_bytes", name), RSS_SHARE, RSS_BYTES),
            ("descriptors", _of("fds", name), COUNT_SHARE, COUNT),
            ("threads", _of("threads", name), COUNT_SHARE, COUNT),
        ]
        for what, value, share, amount in of_process:
            findings += _compare(f"{name}: {what}", before, after, value, share, amount)
    findings += _compare(
        "Redis: bytes", before, after, lambda s: s.redis_bytes or None, REDIS_SHARE, REDIS_BYTES
    )
    held = lambda s: sum(s.blocks_held.values())  # noqa: E731
    findings += _compare("blocks held at rest", before, after, held, 0.0, 0)
    findings += _compare("slots in doubt at rest", before, after, lambda s: s.slots_in_doubt, 0.0, 0)
    return findings


def _of(field: str, process: str) -> Callable[[Sample], float | None]:
    return lambda sample: getattr(sample, field).get(process)


def _compare(
    what: str,
    before: Sequence[Sample],
    after: Sequence[Sample],
    value: Callable[[Sample], float | None],
    share: float,
    amount: float,
) -> list[Finding]:
    first, last = ([v for s in some if (v := value(s)) is not None] for some in (before, after))
    if not first or not last:
        return []  # it did not live through both
    was = statistics.median(first)
    return [Finding(what, was, statistics.median(last), was + max(share * was, amount))]
