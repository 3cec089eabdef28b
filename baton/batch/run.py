"""A batch from its input file to its output file."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from baton.batch import lines
from baton.batch.sending import Outcome, Sender, Sending
from cluster.errors import ConfigError


@dataclass
class Tally:
    """Requests and tokens. `earlier`: answered by runs before this one, `earlier_failed` of them without success."""

    requests: int = 0
    left: int = 0
    earlier: int = 0
    earlier_failed: int = 0
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def add(self, outcome: Outcome) -> None:
        self.succeeded += outcome.ok
        self.failed += not outcome.ok
        prompt, answer = outcome.tokens()
        self.prompt_tokens += prompt
        self.answer_tokens += answer


Shown = Callable[[Tally], None]


def run_batch(
    source: Path, target: Path, sending: Sending, *, retry_failed: bool = False, show: Shown = lambda _: None
) -> Tally:
    """Send what has no answer in `target` yet, and append the answers as they come.

    Raises ConfigError before anything is sent if a line of either file is wrong, and UnauthenticatedError.
    """
    with _opened(source, target) as opened:
        tally = Tally()
        done = set()
        for answer, _ in lines.answers(target):
            if answer.ok or not retry_failed:
                done.add(lines.digest(answer.custom_id))
                tally.earlier_failed += not answer.ok
        tally.requests, tally.left = lines.check(source, done)
        tally.earlier = tally.requests - tally.left
        show(tally)
        left = (one for one in lines.requests(source) if lines.digest(one.custom_id) not in done)
        with _without_failed(opened, target) if retry_failed else contextlib.nullcontext(opened) as output:
            asyncio.run(_send(left, output, sending, tally, show))
    return tally


@contextlib.contextmanager
def _opened(source: Path, target: Path) -> Iterator[BinaryIO]:
    """The output file, open for appending, for this run alone, without a half-written line."""
    if target.exists() and not (target.is_file() or target.is_dir()):
        # Of a device nothing can be read, so that the next run would send everything again.
        raise ConfigError(
            f"{target} is not a regular file: the next run reads what was answered", field="output"
        )
    if source.exists() and not (source.is_file() or source.is_dir()):
        # A pipe would be empty the second time, and nothing of it would be sent.
        raise ConfigError(
            f"{source} is not a regular file: a batch reads its input twice; save it first", field="input"
        )
    try:
        lock = target.open("a+b", buffering=0)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}", field="output") from error
    with lock:
        _lock(lock, target)
        if source.exists() and source.samefile(target):
            raise ConfigError("input and output are the same file", field="output")
        lines.cut_half_line(lock, target)
        yield lock


@contextlib.contextmanager
def _without_failed(opened: BinaryIO, target: Path) -> Iterator[BinaryIO]:
    """The output file without its failed requests. It is rewritten, so it is another one than `opened`, whose lock keeps
    other runs away until then."""
    lines.drop_failed(target)
    with target.open("a+b", buffering=0) as output:
        _lock(output, target)
        yield output


def _lock(output: BinaryIO, target: Path) -> None:
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run writes {target}", field="output") from None


async def _send(
    left: Iterator[lines.Request], output: BinaryIO, sending: Sending, tally: Tally, show: Shown
) -> None:
    """Send requests, `concurrency` at a time; no further one is read before one of them has its answer."""

    async def one_after_another() -> None:
        for request in left:
            outcome, line = _fitting(request.custom_id, await sender.send(request))
            _write(output, line)
            tally.add(outcome)
            show(tally)

    async with Sender(sending) as sender:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(sending.concurrency, tally.left)):
                    group.create_task(one_after_another())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _write(output: BinaryIO, line: bytes) -> None:
    """Write a whole line; an unbuffered file may take a part of it."""
    rest = memoryview(line)
    while rest:
        rest = rest[output.write(rest) :]


def _fitting(custom_id: str, outcome: Outcome) -> tuple[Outcome, bytes]:
    """The outcome and its line; a line that the next run would not read is a failure's."""
    line = _line(custom_id, outcome)
    if len(line) <= lines.MAX_ANSWER_BYTES:
        return outcome, line
    reason = f"the answer's line has {len(line)} bytes; at most {lines.MAX_ANSWER_BYTES} are kept"
    failed = Outcome(error=("answer_too_long", reason))
    return failed, _line(custom_id, failed)


def _line(custom_id: str, outcome: Outcome) -> bytes:
    """An output line in OpenAI's form."""
    code_message = outcome.error
    response = {"status_code": outcome.status, "request_id": outcome.request_id, "body": outcome.body}
    return orjson.dumps(
        {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": response if code_message is None else None,
            "error": None
            if code_message is None
            else dict(zip(("code", "message"), code_message, strict=True)),
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )
