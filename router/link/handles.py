"""The handles of one link: opened, listed for a new connection, and given the entries of the worker's frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from cluster.errors import BatonError, InternalError, PeerLostError
from router.link.connection import ENTRIES_PER_TURN
from router.link.handle import HandleLink, LinkHandle, Reader
from router.link.identity import RouterIdentity
from router.link.outgoing import Outgoing
from router.link.token import PlainToken, Token
from wire import common_pb2, link_pb2

log = logging.getLogger(__name__)
_plain_token = partial(tuple.__new__, PlainToken)  # its own constructor takes twice as long


class Handles:
    """Open handles by number. An exception at one handle's entry ends that attempt alone: the others of the frame are
    dispatched."""

    def __init__(
        self, link: HandleLink, identity: RouterIdentity, outgoing: Outgoing, flush_soon: Callable[[], None]
    ):
        """`flush_soon`: something was added to `outgoing`."""
        self._link = link
        self._identity = identity
        self._outgoing = outgoing
        self._flush_soon = flush_soon
        self._open: dict[int, LinkHandle] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def open(self, reader: Reader, now: float) -> LinkHandle:
        handle = LinkHandle(self._link, self._identity.next_handle(), reader, now)
        self._open[handle.number] = handle
        return handle

    def drop(self, number: int) -> None:
        """Read no more of it, and send Close: an attempt behind a full window sends nothing, and would keep its blocks for
        as long as the link is up."""
        handle = self._open.pop(number, None)
        if handle is not None:
            handle.not_cancelled()
            self._close(number)

    def attaches(self) -> list[link_pb2.LinkAttach]:
        """The entries of a new connection's list. The worker cancels handles that it does not name."""
        made: list[link_pb2.LinkAttach] = []
        for handle in list(self._open.values()):
            if handle.cancelled is None:
                self._guarded(handle, partial(handle.attach, made))
        return made

    def ask(self, now: float, silent_seconds: float) -> None:
        """Ask the worker for the states of handles that have been silent for longer."""
        for handle in list(self._open.values()):
            if now - handle.received_at > silent_seconds:
                handle.received_at = now  # asked again after as long
                self._outgoing.status(handle.number)
                self._guarded(handle, handle.ask)
                if handle.reader.taken_in:
                    self._guarded(handle, handle.reader.repeat_credit)
        self._flush_soon()

    def restart_clocks(self, now: float) -> None:
        for handle in self._open.values():
            handle.received_at = now

    def lose_all(self, error: BatonError) -> None:
        handles = list(self._open.values())
        self._open.clear()
        for handle in handles:
            handle.not_cancelled()
            self._guarded(handle, partial(handle.reader.lost, error))

    # --- entries -------------------------------------------------------------------------------------------

    def take(self, frame: link_pb2.WorkerFrame, now: float, is_newest: Callable[[], bool]) -> Iterator[None]:
        """Dispatch answers, then `tokens`, `extras` and `ends`: so the tokens of each choice are in order of position, and
        its end is behind them. Yields after every ENTRIES_PER_TURN entries. `is_newest`: no other connection has attached
        the handles since the one of this frame; from then on only answers to cancels count here. The newer one has all
        the rest from the positions of its list on, and the pieces of a token that began here begin there again: what
        follows them here would leave a gap."""
        count = 0
        for number in frame.cancelled:
            self._cancelled(number)
            count += 1
            if not count % ENTRIES_PER_TURN:
                yield
        for state in frame.states:
            if not is_newest():
                return
            self._state(state)
            count += 1
            if not count % ENTRIES_PER_TURN:
                yield
        numbers, tokens = _rows(frame.tokens)
        at = 0
        while at < len(tokens):
            if not is_newest():
                return
            end = at + ENTRIES_PER_TURN - count % ENTRIES_PER_TURN
            self._tokens(numbers[at:end], tokens[at:end], now)
            count += min(end, len(tokens)) - at
            at = end
            if not count % ENTRIES_PER_TURN:
                yield
        for extra in frame.extras:
            if not is_newest():
                return
            self._extra(extra, now)
            count += 1
            if not count % ENTRIES_PER_TURN:
                yield
        for end_entry in frame.ends:
            if not is_newest():
                return
            self._end(end_entry)
            count += 1
            if not count % ENTRIES_PER_TURN:
                yield

    def take_tokens(self, columns: link_pb2.TokenColumns, now: float) -> None:
        """Dispatch a frame that has nothing but these, at most ENTRIES_PER_TURN."""
        self._tokens(*_rows(columns), now)

    def _tokens(self, numbers: Sequence[int], tokens: Sequence[Token], now: float) -> None:
        handles = self._open
        for number, token in zip(numbers, tokens, strict=False):
            handle = handles.get(number)
            if handle is None:
                self._not_read(number)
                continue
            handle.received_at = now
            try:
                handle.reader.token(token)
            except Exception as error:
                self._failed(handle, error)

    def _extra(self, extra: link_pb2.HandleToken, now: float) -> None:
        handle = self._open.get(extra.handle)
        if handle is not None and (extra.first or extra.more):
            whole = handle.joined(extra)
            if whole is None:
                return
        else:  # a copy: a part of a frame that is kept would keep the whole frame in memory
            whole = common_pb2.Token()
            whole.CopyFrom(extra.token)
        self._tokens((extra.handle,), (whole,), now)

    def _end(self, entry: link_pb2.HandleEnd) -> None:
        handle = self._open.pop(entry.handle, None)
        self._close(entry.handle)
        if handle is None:
            self._identity.not_read()
            return
        handle.is_cancelled()
        copy = common_pb2.AttemptEnd()
        copy.CopyFrom(entry.end)
        self._guarded(handle, partial(handle.reader.ended, copy))

    def _cancelled(self, number: int) -> None:
        handle = self._open.get(number)
        if handle is not None and handle.cancelled is not None:  # else its reader would wait for ever
            del self._open[number]
            handle.is_cancelled()

    def _state(self, state: link_pb2.HandleState) -> None:
        handle = self._open.get(state.handle)
        if handle is not None and handle.answered() and state.kind == link_pb2.HandleState.UNKNOWN:
            del self._open[state.handle]
            self._guarded(
                handle, partial(handle.reader.lost, PeerLostError("the worker has no such attempt"))
            )

    def _not_read(self, number: int) -> None:
        """Count and close a handle that was given up without an answer: without Close it would hold its blocks."""
        self._identity.not_read()
        self._close(number)

    def _close(self, number: int) -> None:
        self._outgoing.close(number)
        self._flush_soon()

    def _guarded(self, handle: LinkHandle, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(handle, error)

    def _failed(self, handle: LinkHandle, error: Exception) -> None:
        log.error(
            "attempt %s failed at an entry of its worker", handle.reader.transfer_id.hex(), exc_info=error
        )
        self.drop(handle.number)
        try:
            handle.reader.lost(InternalError(f"{type(error).__name__}: {error}"))
        except Exception:
            log.exception("attempt %s failed while its failure was reported", handle.reader.transfer_id.hex())


def _rows(columns: link_pb2.TokenColumns) -> tuple[list[int], list[PlainToken]]:
    """Handles and their tokens. Each column is read at once: a step makes a token for hundreds of handles."""
    handles = columns.handle[:]
    count = len(handles)
    rows = zip(columns.choice[:count], columns.position[:count], columns.token_id[:count], strict=False)
    return handles, list(map(_plain_token, rows))
