"""Files of a model come in parallel: what they share are limits, the first error, and the lock of their directory."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.download.fetch import FILES_AT_ONCE, fetch
from baton.download.hub import Hub
from baton.download.limits import LOWEST_BYTES_PER_SECOND, PROGRESS_BYTES, DownloadLimits
from baton.download.listing import Repository
from baton.download.lock import one_at_a_time
from baton.download.report import DownloadReport, LineReport
from baton.local.certs import make_certs
from cluster.errors import ConfigError, DeadlineError, ModelError, UnavailableError
from tests.baton.download.small_hub import FILES, SmallHub, running_hub
from tests.harness.waiting import wait_for

LARGE = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with running_hub() as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections that clients cut
        yield server
        for held in server.held.values():
            held.set()


def test_several_files_are_under_way_at_once(hub: SmallHub, tmp_path: Path) -> None:
    content = FILES[LARGE]
    names = [f"{index}.safetensors" for index in range(FILES_AT_ONCE + 2)]
    hub.promised = hub.files = dict.fromkeys(names, content)
    hub.held = {name: threading.Event() for name in names}
    with futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(fetch, "hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
        wait_for(lambda: len(hub.asked) == FILES_AT_ONCE, 10, "as many as are allowed")
        for held in hub.held.values():
            held.set()
        done.result(30)
    assert all((tmp_path / name).read_bytes() == content for name in names)


def _part(folder: Path) -> int:
    part = folder / f".{LARGE}.part"
    return part.stat().st_size if part.exists() else 0


def _resumes(hub: SmallHub, folder: Path) -> None:
    """The next attempt asks for the rest only."""
    hub.files, hub.held = dict(FILES), {}
    hub.asked.clear()
    fetch("hf://org/name", folder, endpoint=hub.url, seconds=30)
    assert f"{LARGE}@{1 << 20}" in hub.asked and f"{LARGE}@0" not in hub.asked
    assert (folder / LARGE).read_bytes() == FILES[LARGE]


def test_the_first_error_ends_the_other_files_and_keeps_their_parts(hub: SmallHub, tmp_path: Path) -> None:
    fails = hub.held["config.json"] = threading.Event()
    released = hub.held[LARGE] = threading.Event()
    hub.promised["config.json"] = hub.files["config.json"] = bytes(1 << 20) + b"{}"
    hub.files["config.json"] = bytes(1 << 20) + b"[]"
    with futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(fetch, "hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
        wait_for(lambda: _part(tmp_path) == 1 << 20, 10, "the large file is under way")
        fails.set()
        with pytest.raises(ModelError, match=r"config\.json of org/name"):
            done.result(10)
    assert not released.is_set()
    hub.promised = dict(FILES)
    _resumes(hub, tmp_path)


def test_an_interrupt_keeps_what_has_come(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.held[LARGE] = threading.Event()

    def interrupted(*_: Any, **__: Any) -> None:
        wait_for(lambda: _part(tmp_path) == 1 << 20, 10, "the large file is under way")
        raise KeyboardInterrupt

    monkeypatch.setattr("baton.download.fetch.futures.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    monkeypatch.undo()
    _resumes(hub, tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(now=0.0)
    now.monotonic = lambda: now.now
    monkeypatch.setattr("baton.download.limits.time", now)
    return now


@pytest.mark.filterwarnings("always::ResourceWarning")
def test_a_connection_that_comes_after_the_end_is_closed(
    hub: SmallHub, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, connected = DownloadLimits(30), Hub._connected

    def after_the_end(self: Hub, event: str, info: dict[str, Any]) -> None:
        if event.endswith("connect_tcp.complete"):
            limits.stop()
            self._watch.join()
        connected(self, event, info)

    monkeypatch.setattr(Hub, "_connected", after_the_end)
    reader = Hub(hub.url, Repository.parse("hf://org/name"), "", limits, DownloadReport())
    with pytest.raises(UnavailableError, match="stopped"):
        reader.list_files()
    reader.close()
    del reader
    gc.collect()
    assert not [one for one in recwarn if issubclass(one.category, ResourceWarning)]


def test_a_silent_hub_is_hung_up_over_https_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS takes the descriptor of the connected socket over; reads would last 60 s."""
    make_certs(tmp_path / "certs", [], 2)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certs" / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certs" / "router.pem", tmp_path / "certs" / "router.key")
    held: list[ssl.SSLSocket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_nothing() -> None:
            while True:
                try:
                    held.append(context.wrap_socket(listener.accept()[0], server_side=True))
                except OSError:
                    return

        threading.Thread(target=answer_nothing, daemon=True).start()
        began = time.monotonic()
        endpoint = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DeadlineError):
            fetch("hf://org/name", tmp_path / "model", endpoint=endpoint, seconds=0.5)
        assert held and time.monotonic() - began < 20
        listener.shutdown(socket.SHUT_RDWR)
    for one in held:
        one.close()


def test_a_download_takes_any_time_as_long_as_bytes_come(clock: SimpleNamespace) -> None:
    limits = DownloadLimits(10.0)
    for _ in range(1_000):
        clock.now += 9.0
        limits.arrived(PROGRESS_BYTES)
        limits.check()
    for _ in range(11):
        clock.now += 1.0
        limits.arrived(1)  # a byte now and then is no progress
    with pytest.raises(DeadlineError, match=r"--seconds allows \(10 s\): 0\.0 of at least 1\.0 MiB came"):
        limits.check()


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_a_download_is_not_slower_than_the_lowest_speed(share: float, clock: SimpleNamespace) -> None:
    """A MiB now and then is progress in a minute; with ten minutes allowed it would keep a large file coming for years."""
    limits = DownloadLimits(600.0)

    def trickle() -> None:
        for _ in range(10_000):
            clock.now += 10.0
            limits.arrived(int(share * 10 * LOWEST_BYTES_PER_SECOND))
            limits.check()

    if share > 1:
        trickle()
    else:
        with pytest.raises(
            DeadlineError, match=r"\(600 s\): 8\.6 of at least 9\.4 MiB came; the next run goes on"
        ):
            trickle()


def test_a_pod_waits_for_another_as_long_as_that_one_gets_on(
    clock: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, pauses = tmp_path / ".x.part", []
    part.touch()

    def pause(_: DownloadLimits, seconds: float) -> None:
        pauses.append(seconds)
        clock.now += 9.0
        if len(pauses) < 100:
            part.write_bytes(bytes(len(pauses)))

    monkeypatch.setattr(DownloadLimits, "pause", pause)
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError), one_at_a_time(tmp_path, DownloadLimits(10.0), DownloadReport()):
            pass
    assert 100 <= len(pauses) <= 103


def test_progress_without_bytes_is_seen_by_pods_that_wait(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.download.lock.time", clock)
    lock = tmp_path / ".lock"

    def shown() -> bool:
        old = 1_000_000_000
        os.utime(lock, ns=(old, old))
        show_progress()
        return lock.stat().st_mtime_ns > old

    with one_at_a_time(tmp_path, DownloadLimits(10.0), DownloadReport()) as show_progress:
        assert (shown(), shown()) == (True, False)  # not a system call for each MiB
        clock.now += 1.0
        assert shown()


def test_a_large_file_that_is_checked_shows_progress_meanwhile(hub: SmallHub, tmp_path: Path) -> None:
    """A pod that waits sees nothing change, for as long as the whole file takes."""
    hub.promised = hub.files = {LARGE: bytes(5 << 20)}
    (tmp_path / LARGE).write_bytes(hub.files[LARGE])
    reader = Hub(hub.url, Repository.parse("hf://org/name"), "", DownloadLimits(30), DownloadReport())
    commit, [file] = reader.list_files()
    shown: list[None] = []
    reader.provide(file, commit, tmp_path, lambda: shown.append(None))
    reader.close()
    assert len(shown) >= 5 and hub.asked == []


def test_a_pod_that_waits_says_so(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    lines: list[str] = []
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def pause(*_: Any) -> None:
            clock.now += 4.0
            if clock.now > 20:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(DownloadLimits, "pause", pause)
        report = LineReport(lines.append, lambda: clock.now)
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30, report=report)
    assert (
        lines[:2]
        == [f"another process downloads to {tmp_path} (it holds .lock there); waiting for it, 0.0 of 0.0 GiB"]
        * 2
        and len(lines) <= 3
    )


def test_a_file_system_without_locks_is_named(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        ConfigError, match=r"\.lock cannot be locked \(Bad file descriptor\): run as its owner"
    ):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)


def test_a_disk_that_is_too_small_is_named_before_anything_comes(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and parts that are here need no more room."""
    free, whole = len(FILES[LARGE]) - 1, len(FILES["config.json"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
    with pytest.raises(ConfigError, match=r"no room for the model there \(0\.0 GiB are to come") as caught:
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert str(tmp_path) in caught.value.message and caught.value.field == "out" and hub.asked == []
    (tmp_path / f".{LARGE}.part").write_bytes(FILES[LARGE][: whole + 1])
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "no room for the model there (No space left on device; what has come is kept)"),
        (errno.EROFS, "Read-only file system: name a directory where this user"),
    ],
)
def test_an_error_of_the_disk_names_the_directory(
    number: int, sentence: str, hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("baton.safe_files.append", refuse)
    with pytest.raises(ConfigError) as caught:
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert f"--out {tmp_path}: {sentence}" in caught.value.message and caught.value.field == "out"
