"""The kinds of faults, and the deck that a seed shuffles: every card is drawn once per round, so every point is hit
equally often."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.faults.points import Point
from cluster.protocol.link import STATUS_SECONDS
from tests.harness.bounds import KILL_SECONDS, STOP_SECONDS


class NewAttempts(Enum):
    """What a fault of a link may cost the requests that run."""

    NONE = "none"
    SOON = "within REDISPATCH_SECONDS"
    OF_DEAD = "of attempts that their worker has ended"


ANY_MOMENT = ""  # a signal, whatever the victim is doing

# The rows of the fault matrix in the hand-off's design.
CLIENT, P_BEFORE, P_AFTER = (
    "client goes away",
    "P lost before or during the hand-off",
    "P lost after its last part",
)
D_BEFORE, D_DECODING = "D lost before commit", "D lost while decoding"
DIGEST, SHORT, ROUTER, REDIS = "digest mismatch", "D short of blocks", "router dies", "Redis dies"
NETWORK, LATE = "network partition", "messages dropped, doubled, late"
MATRIX = (CLIENT, P_BEFORE, P_AFTER, D_BEFORE, D_DECODING, DIGEST, SHORT, ROUTER, REDIS, NETWORK, LATE)

P_POINTS = (
    Point.PREFILL_ADMITTED,
    Point.PREFILL_RESERVED,
    Point.SENDER_GRANTED,
    Point.SENDER_WRITTEN,
    Point.PREFILL_COMPUTED,
)
D_POINTS = (
    Point.DECODE_RESERVED,
    Point.LANDING_LANDED,
    Point.LANDING_SCATTERED,
    Point.DECODE_COMMITTING,
)
DECODING = (Point.DECODE_COMMITTED, Point.DECODE_TOKENS, Point.DECODE_DONE)
ROUTING = (Point.ROUTER_PLACED, Point.ROUTER_TOKEN, Point.ROUTER_DONE)
# How often a busy process passes a point before a fault is injected there.
OFTEN = {
    Point.DECODE_TOKENS.value: 200,
    Point.ROUTER_TOKEN.value: 400,
    Point.LANDING_LANDED.value: 12,
    Point.LANDING_SCATTERED.value: 12,
    Point.SENDER_GRANTED.value: 12,
    Point.SENDER_WRITTEN.value: 12,
    Point.LINK_FRAME.value: 200,
}
SOMETIMES = 3
# Kinds of message between P and D (the fields of their oneofs) that may be dropped, doubled or delayed. `part` is not
# among them: a part is a message over gRPC only, and here NIXL writes it.
# `drained` and `abort` are never dropped: the stream delivers them in order, or breaks and they are sent again.
DROPPABLE = ("reserve", "slot_request", "finish", "reserve_reply", "slot_grant", "part_result", "committed")
MESSAGES = (*DROPPABLE, "abort", "drained", "aborted")


def _names(*points: Point) -> tuple[str, ...]:
    return tuple(point.value for point in points)


@dataclass(frozen=True)
class Row:
    """One kind of fault. `points`: a card for each; where a card is to choose among several, `choose` has them.

    `bound_seconds`: the longest silence a Baton client may see; None: none is promised.
    """

    role: str  # router, process (one of a router's), prefill, decode, redis, client, pair, link
    act: str  # kill, stop, cancel, cut, attach, crowd, nothing, or an Act of the fault points
    matrix: str = ""
    points: tuple[str, ...] = (ANY_MOMENT,)
    choose: tuple[str, ...] = ()
    all_of_role: bool = False  # every process of the role is a victim
    bound_seconds: float | None = KILL_SECONDS
    cards: int = 1  # per point and round; 0: drawn only if requested by name
    rank: bool = False  # the victim is a further rank of a tensor-parallel worker, not its leader
    hold_seconds: float = 0.0  # of a stop or a cut; 0: drawn
    way: str = ""  # of a cut; "": drawn
    new_attempts: NewAttempts | None = None  # None: not judged


def _messages(*kinds: str) -> tuple[str, ...]:
    return tuple(f"message.{kind}" for kind in kinds)


def _cut(way: str, seconds: float, bound: float, new: NewAttempts) -> Row:
    """All links of one decode worker, which serves requests in flight."""
    return Row("link", "cut", bound_seconds=bound, cards=0, hold_seconds=seconds, way=way, new_attempts=new)


def _at_link(role: str, act: str, point: Point, bound: float = KILL_SECONDS) -> Row:
    return Row(role, act, points=_names(point), bound_seconds=bound, cards=0, new_attempts=NewAttempts.NONE)


# `--kinds links`: a deck of their own, so that the usual one keeps its 30 rounds in 1,000 faults.
_LINKS: dict[str, Row] = {
    "link reset 0.2 s": _cut("reset", 0.2, KILL_SECONDS, NewAttempts.NONE),
    "link reset 0.5 s": _cut("reset", 0.5, KILL_SECONDS, NewAttempts.NONE),
    "link reset 1 s": _cut("reset", 1.0, KILL_SECONDS, NewAttempts.SOON),
    "link reset 3 s": _cut("reset", 3.0, KILL_SECONDS, NewAttempts.SOON),
    **{
        f"link silent {shown} {seconds:.0f} s": _cut(way, seconds, seconds + KILL_SECONDS, NewAttempts.NONE)
        for way, shown in (("both", "both ways"), ("from", "from the worker"), ("to", "to the worker"))
        for seconds in (1.0, 3.0)
    },
    "link reset behind a frame": _at_link("decode", "reset", Point.LINK_FRAME),
    "link reset in a frame": _at_link("decode", "half", Point.LINK_FRAME),
    "kill decode at a frame": Row("decode", "kill", points=_names(Point.LINK_FRAME), cards=0),
    # The last credit of a full window is sent again once its handle is silent.
    "credit lost": _at_link("router", "drop", Point.LINK_CREDIT, 2 * STATUS_SECONDS + KILL_SECONDS),
    "attach lost": _at_link("link", "attach", Point.LINK_ATTACH),
    "stop router 10 s": Row(
        "router",
        "stop",
        bound_seconds=STOP_SECONDS,
        cards=0,
        hold_seconds=10.0,
        new_attempts=NewAttempts.OF_DEAD,
    ),
}

# `--kinds processes`, with `--processes 2` or more
_PROCESSES: dict[str, Row] = {
    "kill router process": Row("process", "kill", points=(ANY_MOMENT, *_names(*ROUTING)), cards=0),
    "stop router process": Row("process", "stop", bound_seconds=STOP_SECONDS, cards=0),
    "kill router parent": Row("router", "kill", cards=0),
}
LINK_POINTS = (Point.LINK_FRAME, Point.LINK_CREDIT, Point.LINK_ATTACH)


def _redis(act: str, seconds: float = 0.0) -> Row:
    """No stream depends on Redis: what is promised is a killed process's silence, which the machine may cause."""
    return Row("redis servers", act, cards=0, hold_seconds=seconds)


# `--kinds redis` and `--kinds redis-cluster`: each with a Redis of its own kind.
_BEHIND_SENTINELS = {
    "redis promotion": _redis("promote"),
    "redis full": _redis("fill", 4.0),
    "redis emptied": _redis("empty"),
    "redis slow 1–3 s": _redis("slow", 8.0),
    "redis stopped": _redis("freeze"),
}
_IN_CLUSTER = {
    "redis slot moved": _redis("move"),
    "redis slot moved, keys lost": _redis("move without keys"),
}

ROWS: dict[str, Row] = {
    "kill prefill": Row("prefill", "kill", P_BEFORE, _names(*P_POINTS)),
    "kill prefill, all sent": Row("prefill", "kill", P_AFTER, _names(Point.PREFILL_FINISHED)),
    "kill decode, uncommitted": Row("decode", "kill", D_BEFORE, _names(*D_POINTS)),
    "kill decode, decoding": Row("decode", "kill", D_DECODING, _names(*DECODING)),
    "kill router": Row("router", "kill", ROUTER, _names(*ROUTING)),
    "stop prefill": Row(
        "prefill",
        "stop",
        P_BEFORE,
        choose=(ANY_MOMENT, *_names(*P_POINTS, Point.PREFILL_FINISHED)),
        bound_seconds=STOP_SECONDS,
    ),
    "stop decode": Row(
        "decode",
        "stop",
        D_DECODING,
        choose=(ANY_MOMENT, *_names(*D_POINTS, *DECODING)),
        bound_seconds=STOP_SECONDS,
    ),
    "kill rank prefill": Row("prefill", "kill", P_BEFORE, rank=True),
    "kill rank decode": Row("decode", "kill", D_DECODING, rank=True),
    "stop rank prefill": Row("prefill", "stop", P_BEFORE, rank=True, bound_seconds=STOP_SECONDS),
    "stop rank decode": Row("decode", "stop", D_DECODING, rank=True, bound_seconds=STOP_SECONDS),
    "stop router": Row("router", "stop", bound_seconds=STOP_SECONDS),
    "kill redis": Row("redis", "kill", REDIS),
    "stop redis": Row("redis", "stop", REDIS, bound_seconds=STOP_SECONDS),
    "kill all prefill": Row("prefill", "kill", P_BEFORE, all_of_role=True),
    "kill all decode": Row("decode", "kill", D_DECODING, all_of_role=True, bound_seconds=None),
    "cancel": Row("client", "cancel", CLIENT),
    "crowd": Row("client", "crowd", SHORT, bound_seconds=None),
    "corrupt": Row("decode", "corrupt", DIGEST, _names(Point.LANDING_LANDED)),
    # A stream delivers in order or breaks: a message lost on one that lives is a bug somewhere, bounded by the
    # hand-off's own deadline (10 s without progress).
    "drop message": Row("pair", "drop", LATE, choose=_messages(*DROPPABLE), bound_seconds=12.0),
    "double message": Row(
        "pair", "twice", LATE, choose=(*_messages(*MESSAGES), *_names(Point.LANDING_SCATTERED))
    ),
    "late message": Row("pair", "delay", LATE, choose=_messages(*MESSAGES), bound_seconds=STOP_SECONDS),
    "stall": Row(
        "pair",
        "delay",
        LATE,
        choose=_names(*P_POINTS, *D_POINTS, Point.PREFILL_FINISHED, *DECODING),
        bound_seconds=STOP_SECONDS,
    ),
    "cut prefill–decode": Row("prefill>decode", "cut", NETWORK, bound_seconds=STOP_SECONDS),
    "cut router–prefill": Row("router>prefill", "cut", NETWORK, bound_seconds=STOP_SECONDS),
    "cut router–decode": Row("router>decode", "cut", NETWORK, bound_seconds=STOP_SECONDS),
    **_LINKS,
    **_BEHIND_SENTINELS,
    **_IN_CLUSTER,
    **_PROCESSES,
    # No fault: silences that the machine alone causes, which are part of the other rows' recoveries. Not in the deck.
    "nothing": Row("client", "nothing", bound_seconds=None, cards=0),
}


@dataclass(frozen=True)
class Fault:
    number: int
    name: str
    row: Row
    point: str
    at: int  # the passage of the point at which it is injected, from 1
    delay_seconds: float  # after a request was seen in flight
    hold_seconds: float  # of a stop, a cut, a delay
    way: str  # of a cut
    rng: random.Random


def usual(ranks: Mapping[str, int]) -> list[str]:
    """The rows of a run without `--kinds`; `ranks`: of a worker, by role."""
    return [name for name, row in ROWS.items() if row.cards and (not row.rank or ranks[row.role] > 1)]


def chosen(kinds: str) -> list[str]:
    """The names in `--kinds`. A name may contain a comma, but always with a space after it."""
    return [name.strip() for name in re.split(r",(?! )", kinds) if name.strip()]


def expanded(names: Sequence[str]) -> list[str]:
    """`links`, `processes`, `redis` and `redis-cluster` stand for all their rows."""
    decks = {
        "links": _LINKS,
        "processes": _PROCESSES,
        "redis": _BEHIND_SENTINELS,
        "redis-cluster": _IN_CLUSTER,
    }
    return [row for name in names for row in decks.get(name, (name,))]


def redis_of(names: Sequence[str]) -> str:
    """The kind of Redis that rows need. Raises ValueError if they need two."""
    kinds = {_kind_of_redis(name) for name in names}
    if len(kinds) > 1:
        raise ValueError("these rows need different kinds of Redis: run them one after another")
    return kinds.pop()


def _kind_of_redis(name: str) -> str:
    if name in _BEHIND_SENTINELS:
        return "sentinels"
    return "cluster" if name in _IN_CLUSTER else ""


def deck(names: Sequence[str]) -> list[tuple[str, str]]:
    """(row, point) cards of one round."""
    return [
        (name, point) for name in names for point in ROWS[name].points for _ in range(ROWS[name].cards or 1)
    ]


def draw_fault(seed: str, number: int, names: Sequence[str]) -> Fault:
    cards = deck(names)
    random.Random(f"{seed}:deck:{number // len(cards)}").shuffle(cards)
    name, point = cards[number % len(cards)]
    row, rng = ROWS[name], random.Random(f"{seed}:{number}")
    if row.choose:
        point = rng.choice(row.choose)
    at = 1 + rng.randrange(OFTEN.get(point, SOMETIMES))
    # Short ones have no consequence; middling ones make the victim suspect; long ones make it lost and fenced.
    hold = rng.choice((rng.uniform(0.2, 1.5), rng.uniform(2.2, 4.0), rng.uniform(6.0, 9.0)))
    if row.act == "delay":
        hold = rng.choice((rng.uniform(0.01, 0.2), rng.uniform(0.2, 2.0)))
    way = row.way or (rng.choice(("both", "to", "from")) if row.act == "cut" else "")
    hold = row.hold_seconds or hold
    if row.act == "attach":
        at = 1
    return Fault(number, name, row, point, at, rng.uniform(0.0, 0.4), hold, way, rng)
