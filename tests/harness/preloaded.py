"""Python processes that begin with the modules of routers and workers imported.

An import of them takes a second of processor time, that of torch and of a worker's kernels three more, and the tests start
some hundred such processes. One process imports them once and forks the others. Each has its own environment, arguments,
descriptors, signals and exit code, as if it had been started by `python -m`. Its command line, /proc/PID/environ, string
hashes and what PYTHON* variables say are the first one's, and nothing is destroyed at its exit: tests of these start their
own.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from cluster.process.parent_death import die_with_parent

# Only imported: none of them may start a thread or open a connection, which would not survive the fork.
MODULES = ("baton.cli.main", "router.server", "tests.harness.linked_worker", "worker.attempt_log", "numpy")
CLUSTER_MODULES = (
    "baton.cli.main",
    "router.server",
    "prefill_worker.worker",
    "decode_worker.worker",
    "engine.build",
    "engine.attention.paged_cpu",
    "engine.ops.cpu.ops",
    "engine.sampling.cpu_draw",
    "engine.sampling.cpu_cuts",
    "numba.np.arraymath",
)
MAX_REQUEST = 1 << 18  # bytes: arguments and environment
FDS = 4  # stdin, stdout, stderr, and where the pid and then the exit code are written


class ForkedProcess:
    """As subprocess.Popen, for what the harness and `baton up` use of it."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str] | None, status: int):
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
            code = os.read(self._status, 4)
            os.close(self._status)
            if not code:  # the process that forks has ended, and its forks with it or now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self.returncode = int.from_bytes(code, "little", signed=True) if code else -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Preloaded:
    """The process that has imported `modules`; it is started when the first fork is requested, unless `connection` leads
    to one that runs."""

    def __init__(self, modules: Sequence[str] = (), connection: socket.socket | None = None) -> None:
        self._modules = modules
        self._socket = connection
        self._process: subprocess.Popen[bytes] | None = None

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | None,
        stderr: int,
        *,
        session: bool = False,
    ) -> ForkedProcess:
        """`python -m ARGUMENTS`; its output goes to these descriptors. `stdout`: None = to a pipe. `session`: in one
        of its own, and ended with the process that forks."""
        if self._socket is None:
            self._start()
        assert self._socket is not None
        stdin, to_stdin = os.pipe()
        status, to_status = os.pipe()
        from_stdout, to_stdout = os.pipe() if stdout is None else (None, stdout)
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "session": session,
        }
        socket.send_fds(self._socket, [json.dumps(request).encode()], [stdin, to_stdout, stderr, to_status])
        for fd in (stdin, to_status, *(() if from_stdout is None else (to_stdout,))):
            os.close(fd)
        pid = int.from_bytes(os.read(status, 4), "little")
        if not pid:
            raise RuntimeError("the process with the imported modules has ended")
        reader = None if from_stdout is None else os.fdopen(from_stdout, "r")
        return ForkedProcess(pid, os.fdopen(to_stdin, "w"), reader, status)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run with captured output. Raises subprocess.TimeoutExpired after killing the process."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            process = self.fork(arguments, environment, stdout.fileno(), stderr.fileno())
            process.stdin.close()
            try:
                code = process.wait(seconds)
            finally:
                process.kill()
            texts = [(file.seek(0), file.read())[1] for file in (stdout, stderr)]
        return subprocess.CompletedProcess(list(arguments), code, *texts)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.preloaded", str(theirs.fileno()), *self._modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,  # whatever folder a test has changed to
            )
        self._socket = ours

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(20)


_allowed: list[tuple[Preloaded, Preloaded]] = []
_EXECUTABLE = sys.executable
_ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Processes of the harness are forked in this block. Benchmarks, which measure processes, start their own."""
    made = Preloaded(MODULES), Preloaded(CLUSTER_MODULES)
    _allowed.append(made)
    try:
        yield
    finally:
        _allowed.remove(made)
        for one in made:
            one.close()


def preloaded(*, cluster: bool = False) -> Preloaded | None:
    """None where processes are started as usual: outside of `allowed`, and where a test has replaced the interpreter.
    `cluster`: one with a worker's modules too."""
    return _allowed[-1][cluster] if _allowed and sys.executable == _EXECUTABLE else None


# --- the process that forks --------------------------------------------------------------------------------------


def _load(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections of the forks need not look through the modules, which would copy their memory


def forked_from_here() -> Preloaded:
    """A process forked from this one, which must not have threads: with its modules, and ended with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        code = 1
        try:
            die_with_parent()
            _serve(theirs)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    return Preloaded(connection=ours)


def _serve(requests: socket.socket) -> None:
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for `baton up` alone, which stops its children in order
    statuses: dict[int, int] = {}
    watched: list[socket.socket | int] = [requests, waker]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if waker in ready:
            os.read(waker, 512)
            _report_ended(statuses)
        if requests in ready:
            data, fds = _receive(requests)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                for fd in (waker, wake, *statuses.values()):
                    os.close(fd)
                requests.close()
                _run(json.loads(data), fds)
            statuses[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
            with contextlib.suppress(BrokenPipeError):  # the process that requested the fork no longer reads
                os.write(statuses[pid], pid.to_bytes(4, "little"))


def _receive(requests: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize
    data, ancillary, _, _ = requests.recvmsg(MAX_REQUEST, socket.CMSG_SPACE(FDS * size))
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % size])
    return data, list(fds)


def _report_ended(statuses: dict[int, int]) -> None:
    for pid in list(statuses):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            fd = statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(fd, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            os.close(fd)


def _run(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Be `python -m ARGUMENTS`, and exit."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=False)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]  # as `python -m` has it
    module, *arguments = request["arguments"]
    sys.argv = [module, *arguments]
    code = 1
    if request["session"]:
        os.setsid()
        die_with_parent()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: waits for threads
        atexit._run_exitfuncs()
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _load(sys.argv[2:])
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
