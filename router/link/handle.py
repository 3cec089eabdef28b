"""One attempt at one worker, as the router reads it over its link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from cluster.errors import BatonError
from wire import common_pb2, link_pb2


class Reader(Protocol):
    """What an attempt gives for one of its workers. Called on the router's loop; an exception ends the attempt."""

    @property
    def transfer_id(self) -> bytes: ...

    def positions(self) -> Sequence[int]:
        """Per choice of the attempt, in order: the position that is taken next."""

    def limits(self) -> Sequence[int]:
        """Per choice of the attempt, in order: positions below it may come."""

    def token(self, token: common_pb2.Token) -> None:
        """Tokens of a choice come in order of position, perhaps some of them twice."""

    def ended(self, end: common_pb2.AttemptEnd) -> None:
        """The worker sends nothing more."""

    @property
    def taken_in(self) -> bool:
        """The worker has the attempt, or has had it. False: it may still come, as its Run is not answered."""

    def lost(self, error: BatonError) -> None:
        """The worker or its link is lost; nothing more comes."""


class LinkHandle:
    """`number` stands for the attempt in every frame. After `ended` or `lost` it is closed."""

    __slots__ = ("_link", "_pieces", "asked_taken_in", "cancelled", "heard", "number", "reader")

    def __init__(self, link: HandleLink, number: int, reader: Reader, now: float):
        self._link = link
        self.number = number
        self.reader = reader
        self.heard = now  # when its worker last sent something about it
        # Whether the attempt was taken in when the worker was asked for it: calls and links have no common order.
        self.asked_taken_in = False
        self.cancelled: asyncio.Future[None] | None = None  # the worker's answer, while it is waited for

        self._pieces: dict[int, common_pb2.Token] = {}  # by choice: a large token of which more pieces follow

    @property
    def reference(self) -> common_pb2.HandleRef:
        return common_pb2.HandleRef(incarnation=self._link.incarnation, number=self.number)

    def ask(self) -> None:
        """The worker is asked for it now."""
        self.asked_taken_in = self.reader.taken_in

    def attach(self, attaches: list[link_pb2.LinkAttach]) -> None:
        """Add its entry to a new connection's list."""
        self.ask()
        self._pieces.clear()
        attach = link_pb2.LinkAttach(
            transfer_id=self.reader.transfer_id,
            handle=self.number,
            next=self.reader.positions(),
            limit=self.reader.limits(),
        )
        attaches.append(attach)

    def joined(self, piece: link_pb2.HandleToken) -> common_pb2.Token | None:
        """The token, with its last piece. A piece that continues no other, as of an older connection, is dropped."""
        token = self._pieces.pop(piece.token.choice, None)
        if piece.first:
            if token is None or (token.position, len(token.top_logprobs)) != (
                piece.token.position,
                piece.first,
            ):
                return None
            token.top_logprobs.extend(piece.token.top_logprobs)
        else:
            token = common_pb2.Token()
            token.CopyFrom(piece.token)
        if not piece.more:
            return token
        self._pieces[token.choice] = token
        return None

    def credit(self, choice: int, limit: int) -> None:
        self._link.credit(self.number, choice, limit)

    async def cancel(self, seconds: float) -> bool:
        """Ask the worker to end the attempt and forget the handle. True: it has, and blocks and staging are free. False:
        the link is not up, or no answer came in time."""
        return await self._link.cancel(self, seconds)

    def close(self) -> None:
        """Read nothing more of it. For an attempt that may not have ended, `cancel` comes first."""
        self._link.drop(self.number)


class HandleLink(Protocol):
    incarnation: int

    def credit(self, number: int, choice: int, limit: int) -> None: ...
    async def cancel(self, handle: LinkHandle, seconds: float) -> bool: ...
    def drop(self, number: int) -> None: ...
