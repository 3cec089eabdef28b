"""Compiles grammars of clients in processes of their own: some make the library overflow its stack, or work without end.

    router ── tokenizer, grammars ─► server, one thread ── fork ─► a process for each grammar: compile, first masks
           ◄──────── reasons ───────        └ ◄───────────────── the reason, or the signal that ended it

The bounds of such a process are stricter than those of the threads in which workers compile the grammar again.
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
from typing import IO, Any

from cluster.errors import BatonError, InvalidRequestError, OverloadedError
from cluster.grammar.library import make_matcher, make_tokenizer, reason_of
from cluster.grammar.spec import GrammarSpec
from router.request import schema_walk

CPU_SECONDS = 1.0  # compiling, and the search for the place of a fault
WALL_SECONDS = 3.0  # the library may hang where memory ends
STACK_BYTES = 1 << 20  # threads have 2 MiB or more
MEMORY_BYTES = 192 << 20  # more than the server has
MASK_SECONDS = 0.1  # of CPU time, for one token
WALK_TOKENS = 8
WALK_SECONDS = 0.25
SERVER_SECONDS = 60.0  # with reading the tokenizer; only a server that hangs takes longer
_TOO_MUCH = "it takes too much time, memory or depth"


class GrammarTrials:
    """The router's side. One thread at a time."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos: tuple[int, ...]):
        self._settings = json.dumps([tokenizer_json, vocab_size, eos]).encode()
        self._server: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()

    def reason(self, spec: GrammarSpec) -> InvalidRequestError | None:
        """Why the grammar is refused. Raises OverloadedError if no process can tell."""
        question = json.dumps([spec.kind, spec.text]).encode()
        with self._lock:
            for _ in range(2):  # a server that was killed from outside is started again
                try:
                    answer = json.loads(self._ask(question))
                except (OSError, ValueError):
                    self._stop()
                    continue
                return None if answer is None else InvalidRequestError(answer[0], limit=answer[1])
        raise OverloadedError("grammars cannot be checked now")

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
        _send(answers, _in_a_process(tokenizer, GrammarSpec(*json.loads(question))))


def _in_a_process(tokenizer: Any, spec: GrammarSpec) -> bytes:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit()
            os.write(theirs, json.dumps(tried(tokenizer, spec)).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    answer = b""
    if select.select([ours], [], [], WALL_SECONDS)[0]:
        while part := os.read(ours, 65536):
            answer += part
    os.close(ours)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return answer or json.dumps([_TOO_MUCH, f"{CPU_SECONDS:g} s, {MEMORY_BYTES >> 20} MiB"]).encode()


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
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


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
