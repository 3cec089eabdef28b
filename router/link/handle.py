"""The handle of one attempt at one worker, at the router's side of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from cluster.errors import BatonError
from router.link.token import Token
from wire import common_pb2, link_pb2

MAX_EMBEDDING_BYTES = 4 << 20  # of pieces that are joined: no model has as many dimensions
# Of all pieces that a handle holds. A token with a whole vocabulary takes up to 4 MiB.
MAX_PIECES_BYTES = 16 << 20
PIECE_BYTES = 256  # of a piece in memory, beside its entries


class Reader(Protocol):
    """The attempt's side of a handle. Called on the router's event loop; an exception ends the attempt."""

    @property
    def transfer_id(self) -> bytes: ...

    def positions(self) -> Sequence[int]:
        """The next position of each choice of the attempt, in order."""

    def limits(self) -> Sequence[int]:
        """The limit of each choice of the attempt, in order: the worker may send positions below it."""

    def repeat_credit(self) -> None:
        """Send the limit of each choice to the worker again. One that has used its window up sends nothing, so no other
        credit follows one that is lost."""

    def token(self, token: Token) -> None:
        """Take a token. Those of a choice are in order of position; some may be repeated."""

    def ended(self, end: common_pb2.AttemptEnd) -> None:
        """Take the end: the worker sends nothing more."""

    @property
    def taken_in(self) -> bool:
        """Whether the worker has, or had, the attempt. False while its Run is unanswered."""

    def lost(self, error: BatonError) -> None:
        """The worker or its link is lost; nothing more comes."""


class LinkHandle:
    """`number` stands for the attempt in every frame. After `ended` or `lost` it is closed."""

    __slots__ = (
        "_link",
        "_pieces",
        "_pieces_bytes",
        "asked_early",
        "cancelled",
        "number",
        "reader",
        "received_at",
    )

    def __init__(self, link: HandleLink, number: int, reader: Reader, now: float):
        self._link = link
        self.number = number
        self.reader = reader
        self.received_at = now  # time of its last entry
        # Questions for its state that were sent before the Run was answered, and have no answer yet. Calls and links have
        # no common order, so their answers "unknown" mean nothing; they come before the answers to later questions. A
        # worker may answer several at once: as many later answers are ignored then, too, and the next question decides.
        self.asked_early = 0
        self.cancelled: asyncio.Future[None] | None = None  # the awaited answer to a cancel

        # By choice: a large token of which more pieces follow, and the bytes of those that came
        self._pieces: dict[int, tuple[common_pb2.Token, int]] = {}
        self._pieces_bytes = 0  # of all of them

    @property
    def reference(self) -> common_pb2.HandleRef:
        return common_pb2.HandleRef(incarnation=self._link.incarnation, number=self.number)

    def ask(self) -> None:
        """Note that a question for its state is sent now."""
        if not self.reader.taken_in:
            self.asked_early += 1

    def answered(self) -> bool:
        """Note an answer. Returns whether its question was sent after the Run was answered."""
        if not self.asked_early:
            return self.reader.taken_in
        self.asked_early -= 1
        return False

    def attach(self, attaches: list[link_pb2.LinkAttach]) -> None:
        """Add its entry to a new connection's list."""
        self.asked_early = 0  # answers on an older connection are not read
        self.ask()
        self._drop_pieces()
        attach = link_pb2.LinkAttach(
            transfer_id=self.reader.transfer_id,
            handle=self.number,
            next=self.reader.positions(),
            limit=self.reader.limits(),
        )
        attaches.append(attach)

    def joined(self, piece: link_pb2.HandleToken) -> common_pb2.Token | None:
        """Return the token at its last piece, else None. A piece without the one before it (sent on an older connection)
        is dropped, and so are all if they have too many bytes: the next token then leaves a gap."""
        token, size = self._pieces.pop(piece.token.choice, (None, 0))
        self._pieces_bytes -= size
        if piece.first:
            if token is None or token.position != piece.token.position:
                return None
            if len(token.embedding or token.top_logprobs) != piece.first:
                return None
            if len(token.embedding) + len(piece.token.embedding) > MAX_EMBEDDING_BYTES:
                return None
            token.top_logprobs.extend(piece.token.top_logprobs)
            token.embedding += piece.token.embedding
        else:
            token, size = common_pb2.Token(), 0
            token.CopyFrom(piece.token)
        if not piece.more:
            return token
        size += piece.ByteSize() + PIECE_BYTES
        self._pieces[token.choice] = token, size
        self._pieces_bytes += size
        if self._pieces_bytes > MAX_PIECES_BYTES:
            self._drop_pieces()
        return None

    def _drop_pieces(self) -> None:
        self._pieces.clear()
        self._pieces_bytes = 0

    def is_cancelled(self) -> None:
        """Note that its blocks and staging are free, by a cancel or because it ended."""
        if self.cancelled is not None and not self.cancelled.done():
            self.cancelled.set_result(None)

    def not_cancelled(self) -> None:
        """No answer to its cancel will come."""
        if self.cancelled is not None:
            self.cancelled.cancel()

    def credit(self, choice: int, limit: int) -> None:
        self._link.credit(self.number, choice, limit)

    async def cancel(self, seconds: float) -> bool:
        """Ask the worker to end the attempt. True once its blocks and staging are free; False if the link is not up, or
        there is no answer in time."""
        return await self._link.cancel(self, seconds)

    def close(self) -> None:
        """Read no more entries. Call `cancel` before for an attempt that may not have ended."""
        self._link.drop(self.number)


class HandleLink(Protocol):
    incarnation: int

    def credit(self, number: int, choice: int, limit: int) -> None: ...
    async def cancel(self, handle: LinkHandle, seconds: float) -> bool: ...
    def drop(self, number: int) -> None: ...
