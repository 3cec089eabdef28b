"""Compiles grammars of clients in processes of their own: some make the library overflow its stack, or work without end.

    router ── tokenizer, grammars ─► server, one thread ── fork ─► a process for a request's grammars: compile, first masks
           ◄──────── reasons ───────        └ ◄───────────────── the reason, or the signal that ended it

The bounds of such a process are stricter than those of the threads in which workers compile the grammar again. They are of
processor time and memory: a process that gets no processor has no verdict, and its request may be sent again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any

from cluster.errors import BatonError, InvalidRequestError, OverloadedError
from cluster.grammar.library import make_matcher, make_tokenizer, reason_of
from cluster.grammar.spec import GrammarSpec
from router.request import schema_walk

CPU_SECONDS = 1.0  # of a grammar: compiling, and the search for the place of a fault
TOTAL_CPU_SECONDS = 3.0  # of all grammars of a request
HANG_SECONDS = 3.0  # the library may hang where memory ends: a process that sleeps then has ended
WALL_SECONDS = 8.0  # a process that still works then has too little of a processor
STACK_BYTES = 1 << 20  # threads have 2 MiB or more
MEMORY_BYTES = 192 << 20  # more than the server has
MASK_SECONDS = 0.1  # of CPU time, for one token
WALK_TOKENS = 8
WALK_SECONDS = 0.25
SERVER_SECONDS = 60.0  # with reading the tokenizer; only a server that hangs takes longer
LOOK_SECONDS = 0.25
RETRY_SECONDS = 2.0
_NO_VERDICT = "no verdict"
_TOO_MUCH = "it takes too much time, memory or depth"


class GrammarTrials:
    """The router's side. One thread at a time."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: tuple[int, ...]):
        self._settings = json.dumps([tokenizer_json, vocab_size, eos]).encode()
        self._server: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()

    def refusal(self, specs: Sequence[GrammarSpec]) -> tuple[int, InvalidRequestError] | None:
        """The number of the first grammar that is refused, and why. Raises OverloadedError if no process can tell."""
        question = json.dumps([[spec.kind, spec.text] for spec in specs]).encode()
        with self._lock:
            for _ in range(2):  # a server that was killed from outside is started again
                try:
                    answer = json.loads(self._ask(question))
                except (OSError, ValueError):
                    self._stop()
                    continue
                if answer == _NO_VERDICT:
                    break
                if answer is None:
                    return None
                index, reason, limit = answer
                return index, InvalidRequestError(reason, limit=limit)
        raise OverloadedError("grammars cannot be compiled now", retry_after_seconds=RETRY_SECONDS)

    def _ask(self, question: bytes) -> bytes:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "router.request.grammar_trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._end = weakref.finalize(self, _end_server, self._server)
            assert self._server.stdin is not None
            _send(self._server.stdin, self._settings)
        assert self._server.stdin is not None and self._server.stdout is not None
        _send(self._server.stdin, question)
        if not select.select([self._server.stdout], [], [], SERVER_SECONDS)[0]:
            raise OSError("it hangs")
        return _receive(self._server.stdout)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._server = None

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _end_server(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()
    for pipe in (server.stdin, server.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


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
    """Until the router closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes of the router
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer_json, vocab_size, eos = json.loads(_receive(questions))
    tokenizer = make_tokenizer(tokenizer_json, vocab_size, tuple(eos))
    import llguidance  # noqa: F401  # before a fork, once for all

    gc.freeze()
    while True:
        try:
            question = _receive(questions)
        except ValueError:
            return
        specs = [GrammarSpec(*one) for one in json.loads(question)]
        _send(answers, json.dumps(_in_a_process(tokenizer, specs)).encode())


def _in_a_process(tokenizer: Any, specs: Sequence[GrammarSpec]) -> Any:
    """The number of a refused grammar, the reason and the limit; None: none is refused; or _NO_VERDICT."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit()
            for line in _verdicts(tokenizer, specs):
                os.write(theirs, json.dumps(line).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(theirs)
    lines, late = _read(ours, pid)
    os.close(ours)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if lines and lines[-1][0] == "verdict":
        return lines[-1][1]
    # Killed by another process: the kernel, for example, where the machine has no memory left.
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if late == "works" or (killed and not late):
        return _NO_VERDICT
    _, index, seconds = lines[-1] if lines else ("begins", 0, CPU_SECONDS)
    if seconds < CPU_SECONDS:
        return _all_too_much(specs)
    return index, _TOO_MUCH, f"{CPU_SECONDS:g} s, {MEMORY_BYTES >> 20} MiB"


def _verdicts(tokenizer: Any, specs: Sequence[GrammarSpec]) -> Iterator[Sequence[Any]]:
    """("begins", number of a grammar, its processor time in seconds), and at last ("verdict", …)."""
    for index, spec in enumerate(specs):
        seconds = min(CPU_SECONDS, TOTAL_CPU_SECONDS - time.process_time())
        if seconds <= 0:
            yield "verdict", _all_too_much(specs)
            return
        yield "begins", index, seconds
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if (refused := tried(tokenizer, spec)) is not None:
            yield "verdict", (index, *refused)
            return
    yield "verdict", None


def _all_too_much(specs: Sequence[GrammarSpec]) -> tuple[int, str, str]:
    """The last one has all others in it."""
    reason = f"its {len(specs)} parts take too much time together"
    return len(specs) - 1, reason, f"{TOTAL_CPU_SECONDS:g} s"


def _read(pipe: int, pid: int) -> tuple[list[Any], str]:
    """What the process wrote, and what it does if it has not ended in time: it `works` or `hangs`."""
    raw, began, used, late = b"", time.monotonic(), -1, ""
    while not late:
        if select.select([pipe], [], [], LOOK_SECONDS)[0]:
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
    """For the rest of this process, which ends when it goes over one of them."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    with contextlib.suppress(OSError), open("/proc/self/statm") as sizes:
        most = int(sizes.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(
        devnull, 2
    )  # what the library says before it is aborted is the client's doing, and not worth a log's line
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def tried(tokenizer: Any, spec: GrammarSpec) -> tuple[str, str] | None:
    """Why the grammar is refused, and the limit that it exceeds."""

    def compiles(one: GrammarSpec) -> str:
        try:
            make_matcher(one, tokenizer)
        except BatonError as error:
            return error.message.removeprefix("grammar: ")
        return ""

    if spec.kind == "json_schema":
        refused = schema_walk.why_not(json.loads(spec.text), compiles)
        if refused is not None:
            return refused.message, refused.limit
    elif reason := compiles(spec):
        return reason, ""
    return _walked(make_matcher(spec, tokenizer), spec)


def _walked(matcher: Any, spec: GrammarSpec) -> tuple[str, str] | None:
    """The first masks, along tokens that are drawn at random."""
    draws, began = random.Random(spec.key), time.process_time()
    for _ in range(WALK_TOKENS):
        before = time.process_time()
        bits = matcher.compute_bitmask()
        allowed = [
            8 * place + bit for place, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1
        ]
        if matcher.is_error() or not allowed:
            return f"it allows no token: {_reason(matcher)}", ""
        filled = time.process_time()
        followed = matcher.consume_tokens([draws.choice(allowed)])
        if matcher.is_error():
            return f"a token that it allows cannot be followed: {_reason(matcher)}", ""
        if time.process_time() - before > MASK_SECONDS:
            return "the tokens that it allows take too long to find", f"{MASK_SECONDS:g} s for a token"
        if not followed or matcher.is_stopped() or filled - began > WALK_SECONDS:
            return None
    return None


def _reason(matcher: Any) -> str:
    return reason_of(matcher).splitlines()[0][:200]


if __name__ == "__main__":
    _serve()
