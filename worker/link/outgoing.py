"""The next output of a link: one frame at a time, built from the logs of its handles when the frame before has left.

The logs are the only buffer: what several steps made while a frame was unwritten goes out in the next one.
"""

from __future__ import annotations

from collections import deque

from cluster.link.framing import MAX_FRAME_BYTES
from wire import common_pb2, link_pb2
from worker.attempt_log import ChoiceLog
from worker.link.handle import Handle

PIECE_BYTES = 72  # of a piece of a large token, without its top_logprobs
ALTERNATIVE_BYTES = 16  # of one of its top_logprobs, at most
PROMPT_ENTRIES = 512  # log probabilities of prompts in a frame: they become messages there, which takes 1 ms
ROW_BYTES = 31  # of a row of the columns, at most
MAX_ROWS = 2048
MAX_REPLAY_ROWS = MAX_ROWS // 2  # of handles with several tokens due: fresh ones of the others go first
BODY_BYTES = MAX_FRAME_BYTES - 256  # beside a notice, a beat and the columns' own tags
ENTRY_BYTES = 24  # handle, tags and lengths around an entry
CANCELLED_BYTES = 10  # of a handle, at most
MAX_ANSWERS = 4096  # that wait for their frame: with more, a session reads nothing
REPLAY_BYTES = BODY_BYTES // 2  # of a frame


class Outgoing:
    def __init__(self) -> None:
        self._due: dict[int, Handle] = {}  # with something to send, in turn
        self._states: dict[int, link_pb2.HandleState] = {}
        self._cancelled: dict[int, common_pb2.AttemptEnd | None] = {}  # and the ends that were not sent
        self._beat: int | None = None
        self._notices: deque[link_pb2.LinkNotice.ValueType] = deque()

    def due(self, handle: Handle) -> None:
        self._due[handle.number] = handle
        handle.log.is_due = True

    def beat(self, engine_step: int) -> None:
        self._beat = engine_step

    def notice(self, notice: link_pb2.LinkNotice.ValueType) -> None:
        self._notices.append(notice)

    def state(self, state: link_pb2.HandleState) -> None:
        self._states[state.handle] = state

    def cancelled(self, number: int, end: common_pb2.AttemptEnd | None) -> None:
        """`end`: of an attempt that was cancelled, where that was not sent. It is the answer then, and has the report."""
        self._cancelled[number] = end

    @property
    def full(self) -> bool:
        """The router asks faster than it reads the answers."""
        return len(self._states) + len(self._cancelled) >= MAX_ANSWERS

    def drop(self, number: int) -> None:
        self._due.pop(number, None)

    def drop_all(self) -> None:
        """Drop tokens, ends and answers about handles: another link sends them now."""
        self._due.clear()
        self._states.clear()
        self._cancelled = dict.fromkeys(self._cancelled)

    @property
    def empty(self) -> bool:
        waits = self._due or self._states or self._cancelled or self._notices
        return not waits and self._beat is None

    def next_frame(self) -> tuple[link_pb2.WorkerFrame, list[Handle]]:
        """The frame, and the handles whose end it has."""
        frame = link_pb2.WorkerFrame()
        if self._notices:
            frame.notice = self._notices.popleft()
        if self._beat is not None:
            frame.beat.engine_step = self._beat
            self._beat = None
        left = BODY_BYTES
        while self._states:  # before tokens: a router that attaches waits for them
            number, state = next(iter(self._states.items()))
            if (size := state.ByteSize() + ENTRY_BYTES) > left:
                break
            frame.states.append(state)
            del self._states[number]
            left -= size
        while self._cancelled and left > ENTRY_BYTES:
            number = next(iter(self._cancelled))
            end = self._cancelled.pop(number)
            if end is not None and (size := end.ByteSize() + ENTRY_BYTES) <= left:
                frame.ends.append(link_pb2.HandleEnd(handle=number, end=end))
                left -= size
            else:
                frame.cancelled.append(number)
                left -= CANCELLED_BYTES
        ended = self._tokens(frame, left)
        return frame, ended

    def _tokens(self, frame: link_pb2.WorkerFrame, left: int) -> list[Handle]:
        """Fresh tokens of all handles, then more of those that are behind, in turns; ends where nothing is left."""
        rows = _Rows(frame, left)
        ended: list[Handle] = []
        behind: list[Handle] = []
        due = iter(self._due.values())
        self._due = {}
        for handle in due:
            if rows.full(MAX_ROWS):
                self._due[handle.number] = handle
                self._due.update((one.number, one) for one in due)
                break
            log = handle.log
            log.is_due = False
            waits = rows.take_next(handle)
            if log.end_event is None:
                if waits:
                    behind.append(handle)
            elif self._end(frame, rows, handle):
                ended.append(handle)
            elif waits or handle.end_due:
                behind.append(handle)
        fresh = max(0, rows.left - REPLAY_BYTES)
        rows.left -= fresh
        for handle in behind:
            if not rows.full(MAX_REPLAY_ROWS):
                rows.take(handle, max(1, MAX_REPLAY_ROWS // (len(behind) * len(handle.log.choices))))
                if self._end(frame, rows, handle):
                    ended.append(handle)
                    continue
            if handle.waits:
                self.due(handle)
        rows.finish()
        return ended

    @staticmethod
    def _end(frame: link_pb2.WorkerFrame, rows: _Rows, handle: Handle) -> bool:
        end = handle.log.end_event
        if end is None or not handle.end_due or not rows.fits(end.ByteSize()):
            return False
        frame.ends.append(link_pb2.HandleEnd(handle=handle.number, end=end))
        rows.left -= end.ByteSize() + ENTRY_BYTES
        return True


def _without_alternatives(token: common_pb2.Token) -> common_pb2.Token:
    """Without its embedding too."""
    return common_pb2.Token(
        choice=token.choice,
        position=token.position,
        token_id=token.token_id,
        logprob=token.logprob,
        finish=token.finish,
        rank=token.rank,
    )


class _Rows:
    """Tokens of a frame. Lists first: a repeated field takes them faster at once than one by one."""

    def __init__(self, frame: link_pb2.WorkerFrame, left: int):
        self._frame = frame
        self.left = left  # bytes
        self._of_prompts = PROMPT_ENTRIES
        # Handles with tokens of their prompt in this frame. Its columns are read first: their answers go in a later one.
        self._with_prompt: set[int] = set()
        self._handles: list[int] = []
        self._choices: list[int] = []
        self._positions: list[int] = []
        self._tokens: list[int] = []

    def full(self, rows: int) -> bool:
        return len(self._handles) >= rows or self.left < ROW_BYTES

    def fits(self, size: int) -> bool:
        return size + ENTRY_BYTES <= self.left

    def take_next(self, handle: Handle) -> bool:
        """Take one token of each choice. Returns whether more of its tokens could be sent."""
        log = handle.log
        if len(log.choices) > 1 or log.choices[0].extras:
            self.take(handle, 1)
            return log.may_send
        (choice,) = log.choices
        at, sent = choice.sent - choice.first, choice.sent
        due = min(len(choice.tokens) - at, choice.limit - sent)
        if due > 0:  # there is room: the frame is not full
            self._handles.append(handle.number)
            self._choices.append(choice.choice)
            self._positions.append(sent)
            self._tokens.append(choice.tokens[at])
            self.left -= ROW_BYTES
            choice.sent = sent + 1
        return due > 1

    def take(self, handle: Handle, most: int) -> None:
        """Take at most `most` tokens of each choice."""
        for choice in handle.log.in_order:
            due = min(len(choice.tokens) + choice.first, choice.limit, choice.sent + most)
            is_prompt = choice is handle.log.prompt
            while choice.sent < due and self.left >= ROW_BYTES:
                if is_prompt and self._of_prompts <= 0:
                    return
                extra = choice.extras.get(choice.sent) if choice.extras else None
                if extra is None:
                    self._handles.append(handle.number)
                    self._choices.append(choice.choice)
                    self._positions.append(choice.sent)
                    self._tokens.append(choice.tokens[choice.sent - choice.first])
                    self.left -= ROW_BYTES
                elif not self._extra(handle, choice, extra):
                    return
                choice.sent += 1
                if is_prompt and extra is not None:
                    self._with_prompt.add(handle.number)
                    self._of_prompts -= 1 + len(extra.top_logprobs)
            if is_prompt and (choice.sent < choice.end or handle.number in self._with_prompt):
                return

    def _extra(self, handle: Handle, choice: ChoiceLog, token: common_pb2.Token) -> bool:
        """Add the token, or as much of it as fits. Returns whether all of it is sent now."""
        number, size = handle.number, token.ByteSize()
        if size <= REPLAY_BYTES:
            if not self.fits(size):
                return False
            self._frame.extras.append(link_pb2.HandleToken(handle=number, token=token))
            self.left -= size + ENTRY_BYTES
            return True
        room = min(self.left, REPLAY_BYTES) - PIECE_BYTES
        count = room if token.embedding else room // ALTERNATIVE_BYTES
        if count <= 0:
            return False
        first, size = choice.part, len(token.embedding or token.top_logprobs)
        entry = self._frame.extras.add(handle=number, first=first, more=first + count < size)
        entry.token.CopyFrom(_without_alternatives(token))
        entry.token.embedding = token.embedding[first : first + count]
        entry.token.top_logprobs.extend(token.top_logprobs[first : first + count])
        self.left -= entry.ByteSize() + ENTRY_BYTES
        handle.log.begun, choice.part = choice, first + count if entry.more else 0
        return not entry.more

    def finish(self) -> None:
        if self._handles:
            columns = self._frame.tokens
            columns.handle.extend(self._handles)
            columns.choice.extend(self._choices)
            columns.position.extend(self._positions)
            columns.token_id.extend(self._tokens)
