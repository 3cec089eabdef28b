"""Compiles grammars of clients in processes of their own: some make the library overflow its stack, or work without end.

    router ── tokenizer, grammars ─► server, one thread ── fork ─► a process for a request's grammars: compile, first masks
           ◄──────── reasons ───────        └ ◄───────────────── the reason, or the signal that ended it

The bounds of such a process are stricter than those of the threads in which workers compile the grammar again. They are of
processor time and memory: a process that gets no processor, or fails for a reason of the router's own, has no verdict, and
its request may be sent again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple, NoReturn

from cluster.errors import DrainingError, OverloadedError
from cluster.grammar.library import make_tokenizer
from cluster.grammar.spec import GrammarSpec
from router.request.grammar.verdict import tried

CPU_SECONDS = 1.0  # of a grammar: compiling, and the search for the place of a fault
TOTAL_CPU_SECONDS = 3.0  # of all grammars of a request
SHORT_CPU_SECONDS = (
    0.2  # of a request whose grammars are like nearly all: others wait for a trial of this length
)
HANG_SECONDS = 3.0  # the library may hang where memory ends: a process that sleeps then has ended
WALL_SECONDS = 8.0  # a process that still works then has too little of a processor
STACK_BYTES = 1 << 20  # threads have 2 MiB or more
MEMORY_BYTES = 192 << 20  # more than the server has
SERVER_SECONDS = 60.0  # with reading the tokenizer; only a server that hangs takes longer
NICE = 5  # beside the router's own work: a third of its share of a processor that both want
POLL_SECONDS = 0.25
RETRY_SECONDS = 2.0
_NO_VERDICT = "no verdict"
_TOO_MUCH = "it takes too much time, memory or depth"
# What a grammar does to the process that compiles it. Any other signal comes from outside.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS})
_MEMORY_ENDED = 3  # exit status

log = logging.getLogger(__name__)


class Finding(NamedTuple):
    """The result of a trial of a request's grammars, in their order.

    `passed`: so many of the first ones are allowed. `refused`: the number of the one that is not; None = all passed. Those
    behind the first `passed` were not tried to the end. `lasting`: the grammar is refused by itself, whatever the others
    of its request took. `unfinished`: the time of a short trial ended before there was a verdict about those.
    """

    passed: int
    refused: int | None = None
    reason: str = ""
    limit: str = ""
    lasting: bool = True
    unfinished: bool = False


class GrammarTrials:
    """The router's side. One thread at a time. `short`: a trial's processor time is SHORT_CPU_SECONDS, and decides nothing
    about a grammar."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: tuple[int, ...], *, short: bool = False):
        seconds = SHORT_CPU_SECONDS if short else None
        self._settings = json.dumps([tokenizer_json, vocab_size, eos, seconds]).encode()
        self._server: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def find(self, specs: Sequence[GrammarSpec]) -> Finding:
        """Try grammars, the last of which has the others in it. Raises OverloadedError if no process can tell,
        DrainingError if the trials are closed."""
        question = json.dumps([[spec.kind, spec.text] for spec in specs]).encode()
        with self._lock:
            for _ in range(2):  # a server that was killed from outside is started again
                if self._closed:
                    break
                try:
                    answer = json.loads(self._ask(question))
                except (OSError, ValueError):
                    self._stop()
                    continue
                if not isinstance(answer, str):
                    return Finding(*answer)
                if answer != _NO_VERDICT:
                    log.error("a grammar could not be tried: %s", answer)
                break
        if self._closed:
            raise DrainingError("this router is shutting down", retry_after_seconds=RETRY_SECONDS)
        raise OverloadedError("grammars cannot be compiled now", retry_after_seconds=RETRY_SECONDS)

    def _ask(self, question: bytes) -> bytes:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "router.request.grammar.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._end = weakref.finalize(self, _end_server, self._server)
            if self._closed:  # since the thread began to start it
                raise OSError("the router ends")
            assert self._server.stdin is not None
            os.set_blocking(self._server.stdin.fileno(), False)
            _write(self._server.stdin.fileno(), self._settings)
        assert self._server.stdin is not None and self._server.stdout is not None
        _write(self._server.stdin.fileno(), question)
        if not _is_ready(self._server.stdout.fileno(), select.POLLIN, SERVER_SECONDS):
            raise OSError("it hangs")
        return _receive(self._server.stdout)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._server = None

    def close(self) -> None:
        """End the server, and with it what a thread waits for."""
        self._closed = True
        if self._end is not None:
            self._end()


def _end_server(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()
    for pipe in (server.stdin, server.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _is_ready(pipe: int, event: int, seconds: float) -> bool:
    """Whether it has bytes (POLLIN) or room (POLLOUT), or has ended, in time. A router has more files than select() can
    name."""
    waits = select.poll()
    waits.register(pipe, event)
    return bool(waits.poll(1000 * seconds))


def _write(pipe: int, message: bytes) -> None:
    """`pipe` does not block. Raises OSError if the server does not read within SERVER_SECONDS, or has ended."""
    rest = memoryview(struct.pack("<I", len(message)) + message)
    while rest:
        if not _is_ready(pipe, select.POLLOUT, SERVER_SECONDS):
            raise OSError("it hangs")
        rest = rest[os.write(pipe, rest) :]


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack("<I", len(message)) + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    """Raises ValueError at the pipe's end."""
    head = pipe.read(4)
    if len(head) < 4:
        raise ValueError("the pipe has ended")
    (size,) = struct.unpack("<I", head)
    return pipe.read(size)


# --- the server's side -----------------------------------------------------------------------------------


def _serve() -> None:
    """Serve trials until the router closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes of the router
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer_json, vocab_size, eos, short = json.loads(_receive(questions))
    tokenizer = make_tokenizer(tokenizer_json, vocab_size, tuple(eos))
    import llguidance  # noqa: F401  # before a fork, once for all

    gc.freeze()
    while True:
        try:
            question = _receive(questions)
        except ValueError:
            return
        specs = [GrammarSpec(*one) for one in json.loads(question)]
        _send(answers, json.dumps(_in_a_process(tokenizer, specs, short)).encode())


def _in_a_process(tokenizer: Any, specs: Sequence[GrammarSpec], short: float | None = None) -> Finding | str:
    """Try the grammars in a process. Returns its finding; or _NO_VERDICT, or the traceback of a fault that is no
    grammar's. `short`: the processor time of a short trial, seconds."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _try_all(tokenizer, specs, theirs, short)
    os.close(theirs)
    lines, late = _read(ours, pid)
    os.close(ours)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    end = "hangs" if late == "hangs" else "" if late else _end_of(status)
    return _finding(lines, end, len(specs), is_short=short is not None)


def _try_all(tokenizer: Any, specs: Sequence[GrammarSpec], pipe: int, short: float | None = None) -> NoReturn:
    """The process of a request's grammars."""

    def write(line: Sequence[Any]) -> None:
        os.write(pipe, json.dumps(line).encode() + b"\n")

    status = 1
    try:
        _leave_server()
        _limit()
        for line in _verdicts(tokenizer, specs, short):
            write(line)
        status = 0
    except (MemoryError, RecursionError):
        status = _MEMORY_ENDED
    except BaseException:
        write(("fault", traceback.format_exc()[-2000:]))
    finally:
        os._exit(status)


def _end_of(status: int) -> str:
    """How a process has ended because of a grammar: in its `time`, by a `crash`; empty: by anything else."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "time" if number == signal.SIGPROF else "crash" if number in _CRASHES else ""
    return "crash" if os.WEXITSTATUS(status) == _MEMORY_ENDED else ""


def _finding(lines: Sequence[Sequence[Any]], end: str, count: int, *, is_short: bool) -> Finding | str:
    """`lines`: of the process; `end`: `hangs`, or as `_end_of` says; `count`: of the grammars."""
    if not lines:
        return _NO_VERDICT
    if lines[-1][0] == "verdict":
        return Finding(*lines[-1][1])
    if lines[-1][0] == "fault":
        return str(lines[-1][1])
    if not end:
        return _NO_VERDICT
    _, index, seconds = lines[-1]  # of the grammar that was being tried: those before it passed
    if end == "time" and is_short:
        return Finding(index, unfinished=True)
    if end == "time" and seconds < CPU_SECONDS:
        return _all_too_much(index, count)
    # Without those before it the grammar might have had memory enough. They are not tried a second time.
    lasting = end == "time" or index == 0
    return Finding(index, index, _TOO_MUCH, f"{CPU_SECONDS:g} s, {MEMORY_BYTES >> 20} MiB", lasting)


def _verdicts(tokenizer: Any, specs: Sequence[GrammarSpec], short: float | None) -> Iterator[Sequence[Any]]:
    """("begins", number of a grammar, its processor time in seconds), and at last ("verdict", a Finding)."""
    total = TOTAL_CPU_SECONDS if short is None else short
    for index, spec in enumerate(specs):
        seconds = min(CPU_SECONDS, total - time.process_time())
        if seconds <= 0:
            late = Finding(index, unfinished=True) if short is not None else _all_too_much(index, len(specs))
            yield "verdict", late
            return
        yield "begins", index, seconds
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if (refused := tried(tokenizer, spec)) is not None:
            yield "verdict", Finding(index, index, *refused)
            return
    yield "verdict", Finding(len(specs))


def _all_too_much(passed: int, count: int) -> Finding:
    """Refuse the last one, which has all others in it, this time: of those that passed none is tried again."""
    reason = f"its {count} parts take too much time together"
    return Finding(passed, count - 1, reason, f"{TOTAL_CPU_SECONDS:g} s", lasting=False)


def _read(pipe: int, pid: int) -> tuple[list[Any], str]:
    """The lines that the process wrote, and its state if it has not ended in time: it `works` or `hangs`."""
    raw, began, used, late = b"", time.monotonic(), -1, ""
    while not late:
        if _is_ready(pipe, select.POLLIN, POLL_SECONDS):
            part = os.read(pipe, 65536)
            if not part:
                break
            raw += part
        waited = time.monotonic() - began
        if waited > HANG_SECONDS:
            sleeps, ticks = _state(pid)
            if sleeps and ticks == used:
                late = "hangs"
            elif waited > WALL_SECONDS:
                late = "works"
            used = ticks
    return [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")], late


def _state(pid: int) -> tuple[bool, int]:
    """Whether a process sleeps, and its processor time in ticks. Sleeping where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] == b"S", int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return True, 0


def _limit() -> None:
    """Set limits for the rest of this process, which ends when it exceeds one of them."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    with contextlib.suppress(OSError), open("/proc/self/statm") as sizes:
        most = int(sizes.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _leave_server() -> None:
    """The server may be killed: the router then sees the end of its pipe, and this process ends soon by itself."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS + HANG_SECONDS)
    devnull = os.open(os.devnull, os.O_RDWR)
    # What the library says before it is aborted is the client's doing, and not worth a log's line.
    for inherited in (0, 1, 2):
        os.dup2(devnull, inherited)


if __name__ == "__main__":
    _serve()
