"""`baton drain --self` without Redis, and the meaning of its exit codes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from baton.cli import drain as cli
from baton.cli.drain import Drainer, Process
from baton.cli.main import app
from cluster.config.shared import ClusterFields
from cluster.errors import ConfigError, DeadlineError, UnavailableError
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from tests.harness.waiting import wait_for

UNREACHABLE = "redis://127.0.0.1:1"
GOES = "import threading; print('up', flush=True); threading.Event().wait()"
STAYS = f"import signal; signal.signal(signal.SIGTERM, lambda *_: None); {GOES}"
Start = Callable[[str], tuple[subprocess.Popen[str], Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process and the ready file that it would have written."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        file = tmp_path / "ready.json"
        file.write_text(json.dumps({"id": "decode-0", "role": "decode", "pid": process.pid}))
        return process, file

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def drain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["drain", *arguments])


def test_without_redis_the_process_is_signalled_directly(start: Start) -> None:
    process, file = start(GOES)
    told = drain("--self", "--ready-file", str(file), "--redis-url", UNREACHABLE, "--wait", "20")
    assert told.exit_code == 0 and "gets SIGTERM and drains" in told.output
    assert process.wait(10) != 0
    again = drain("--self", "--ready-file", str(file), "--redis-url", UNREACHABLE)
    assert again.exit_code == 0 and "has left already" in again.output


@pytest.mark.parametrize("text", ["[]", '"a"', '{"id": "a", "pid": null}', "{}", "\0"])
def test_another_file_than_a_process_writes_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "ready").write_text(text)
    told = drain("--self", "--ready-file", str(tmp_path / "ready"), "--redis-url", UNREACHABLE)
    assert isinstance(told.exception, ConfigError) and told.exception.field == "ready_file"


def test_a_drain_longer_than_the_wait_is_exit_code_3(start: Start) -> None:
    _, file = start(STAYS)
    told = drain("--self", "--ready-file", str(file), "--wait", "0.3")
    assert told.exit_code == 3 and "still runs after 0.3 s" in told.output


def test_another_process_with_the_same_pid_is_not_signalled(start: Start, tmp_path: Path) -> None:
    process, file = start(GOES)
    found = Process.read(file)
    earlier = Process(found.id, found.pid, found.role, written=time.time() - 3600)
    assert found.runs() and not earlier.runs()
    earlier.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)


def test_a_drain_without_a_reachable_worker_is_an_error() -> None:
    assert isinstance(drain("decode-0", "--redis-url", UNREACHABLE).exception, UnavailableError)
    assert isinstance(drain("--self", "--redis-url", UNREACHABLE).exception, UnavailableError)
    for arguments in ([], ["decode-0", "--self"], ["decode-0"]):
        failed = drain(*arguments)
        assert isinstance(failed.exception, ConfigError), failed.output


def worker(**facts: Any) -> WorkerInfo:
    of = {"worker_id": "decode-0", "epoch": 1, "slot": 0, "role": "decode", "model_id": "m", "address": "h:1"}
    more = {"metrics_address": "h:2", "layout": b"", "place": "", "host": "here", "max_model_len": 1}
    return WorkerInfo(**{**of, **more, "blocks_total": 1, "process": "one", "state": "draining", **facts})


class Registry(Drainer):
    """A cluster whose workers are as listed, from one look to the next; the last one stays."""

    def __init__(self, *seen: list[WorkerInfo]):
        self.said: list[str] = []
        self.marked: list[tuple[str, str]] = []
        self.read: list[Any] = []  # which workers, at each look
        self._seen = list(seen)
        super().__init__(ClusterFields(redis_url="redis://x"), self.said.append)

    def workers(self, only: Any = None) -> list[WorkerInfo]:
        self.read.append(only if only is None else list(only))
        return self._seen.pop(0) if len(self._seen) > 1 else self._seen[0]

    def mark(self, worker_ids: Any, then: Any) -> None:
        self.marked += [(one, then) for one in worker_ids]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([], "decode-0 has left"),
        ([worker(process="another", state="ready")], "decode-0 has left"),  # it has started again meanwhile
        ([worker(lease="dead")], "decode-0 is dead: it ended without leaving,"),
    ],
)
def test_a_worker_that_has_gone_ends_the_wait(after: list[WorkerInfo], said: str) -> None:
    registry = Registry([worker()], [worker()], after)
    registry.wait(["decode-0"], 20.0, "exit", lambda _: None)
    assert [line.partition(" after")[0] for line in registry.said] == [said]
    assert not registry.marked
    assert all(one == ["decode-0"] for one in registry.read), "hooks of many pods look ten times a second"


@dataclass
class Returned:
    """Reads of a Redis that has returned."""

    may_lack_some: bool = True

    def close(self) -> None:
        pass


@pytest.mark.parametrize("lost", [[], [worker(lease="dead")]])
def test_a_worker_whose_lease_ran_out_without_redis_has_not_ended(lost: list[WorkerInfo]) -> None:
    """Redis has returned with what it had, or with nothing, and workers renew their leases within two seconds."""
    registry = Registry([worker()], lost, [worker()], lost)
    returned: Any = Returned()
    registry._named = returned

    def look(_: str) -> None:
        returned.may_lack_some = len(registry.read) < 4

    registry.wait(["decode-0"], 20.0, "exit", look)
    assert len(registry.read) == 5 and len(registry.said) == 1


def test_a_worker_whose_mark_redis_has_lost_is_marked_again() -> None:
    registry = Registry([worker()], [worker(state="ready")], [])
    registry.wait(["decode-0"], 20.0, "stay", lambda _: None)
    assert registry.marked == [("decode-0", "stay")]
    with pytest.raises(DeadlineError, match="decode-0 still draining after 0 s"):
        Registry([worker()]).wait(["decode-0"], 0.0, "exit", lambda _: None)


def test_workers_of_this_host_are_those_that_live() -> None:
    host = socket.gethostname()
    of_host = [
        worker(worker_id=f"w-{lease}", host=host, lease=lease) for lease in ("live", "suspect", "dead")
    ]
    assert Registry([*of_host, worker(host="elsewhere")]).on_this_host() == ["w-live", "w-suspect"]


def test_a_pod_that_ends_keeps_ray_from_starting_its_worker_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would restart the replica in a pod of KubeRay, which runs until its grace period has passed."""
    registry = Registry([worker(host=socket.gethostname())])
    monkeypatch.setattr("baton.cli.drain.Drainer", lambda *_: registry)
    assert drain("--self", "--redis-url", "redis://x").exit_code == 0
    assert registry.marked == [("decode-0", "stay")]
    assert drain("decode-0", "--redis-url", "redis://x").exit_code == 0
    assert registry.marked[1:] == [("decode-0", "exit")]


def test_a_worker_may_have_any_name() -> None:
    """A spinner takes a text for rich's markup, whatever its console does: this name would be an end without a begin."""
    registry = Registry([worker(worker_id="decode[/0]")], [worker(worker_id="decode[/0]")], [])
    cli._drain(registry, ["decode[/0]"], 20.0, "exit")
    assert registry.said[0].startswith("decode[/0] has left")


def test_a_worker_that_redis_has_lost_has_not_left(redis_url: str, namespace: str) -> None:
    """Redis was restarted, empty, and the worker has not registered again: who waits would end its machine."""
    healthy, said = [True], list[str]()
    registration = Registration(
        redis_url, namespace, worker(process="", state="ready"), healthy=lambda: healthy[0]
    )
    registration.start()
    wait_for(lambda: registration.slot, 60.0, "it is registered")
    drainer = Drainer(ClusterFields(redis_url=redis_url, namespace=namespace), said.append)
    drainer.mark(["decode-0"], "exit")
    waiting = threading.Thread(target=lambda: drainer.wait(["decode-0"], 60.0, "exit", lambda _: None))
    waiting.start()
    wait_for(lambda: drainer._named is not None and drainer._named._slots, 60.0, "it looks")
    healthy[0] = False
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*client.keys(f"{{{namespace}}}:*"))
    time.sleep(0.5)
    healthy[0] = True
    wait_for(lambda: "decode-0 will drain" in said[1:], 60.0, "it is marked again")
    assert waiting.is_alive()
    registration.stop()
    waiting.join(60.0)
    assert said[-1].startswith("decode-0 has left")
