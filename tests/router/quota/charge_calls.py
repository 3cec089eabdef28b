"""A model of charges and their records, and calls to Redis that are repeated, lose their answer, or arrive late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from router.quota.quota import QuotaCharge, Use

REACHED: Counter[str] = Counter()


@dataclass(eq=False)
class Held:
    """A charge that its router has not settled; `taken_with`: so many tokens its client took along to another one."""

    charge: QuotaCharge
    again: bool
    shown: int  # tokens of the answer that the client had when it came here
    applied_at: int | None = None  # None: Redis has not charged it, as far as it got
    taken_with: int | None = None
    settled: bool = False
    lost: bool = False  # its record was forgotten, or replaced, since


@dataclass
class Record:
    """The owner of the charge for a request of this name, as the records in Redis should have it."""

    owner: Held | None  # None: let go
    charged: int
    until: int  # ms
    times: int = 0
    done: bool = False


@dataclass
class Sent:
    """A call: its script, keys and arguments, and its effect on the model when it is first executed."""

    script: str
    keys: list[str]
    arguments: list[Any]
    at: int
    held: Held | None = None
    use: Use | None = None
    arrived: bool = False


@dataclass
class Way:
    """Replaces a router's ScriptCall."""

    machine: Any
    source: str
    sent: list[Sent] = field(default_factory=list)

    async def __call__(self, keys: Any, arguments: Any, seconds: float) -> Any:
        call = Sent(self.source, list(keys), list(arguments), self.machine.now)
        self.sent.append(call)
        self.machine.sent.append(call)
        how = self.machine.way
        REACHED[how] += 1
        if how == "late":
            raise TimeoutError("Redis did not answer in time")
        call.arrived = True
        answer = self.machine.run(call)
        if how == "repeated" and (not answer or answer[0] == 0):
            assert self.machine.run(call) == answer, "a repetition has another answer"
        if how == "answer lost":
            raise TimeoutError("Redis did not answer in time")
        return answer

    async def close(self) -> None:
        """Nothing is held."""


def with_our_clock(source: str) -> str:
    assert source.count("call('TIME')") == 1
    return source.replace("call('TIME')", "{call('GET', KEYS[1] .. ':clock') or '0', '0'}")
