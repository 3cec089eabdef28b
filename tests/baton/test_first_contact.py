"""Mistakes at a first start give one sentence that says what to do, never a traceback."""

from __future__ import annotations

import errno
import io
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main as cli
from baton.cli import serve
from baton.cli.output import say
from baton.local import children
from baton.local.certs import make_certs
from baton.local.cluster import LocalCluster
from baton.local.options import UpOptions
from baton.local.state import ClusterState, RedisState, check_writable
from cluster.config import sources
from cluster.config.router import RouterConfig
from cluster.config.shared import ClusterFields
from cluster.config.worker import WorkerConfig
from cluster.errors import ConfigError, SetupError
from tests.baton.starts import UNREACHABLE, failed_start
from tests.harness.preloaded import preloaded


def baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    forks = preloaded()
    assert forks is not None
    return forks.run(["baton", *arguments], {**os.environ, "COLUMNS": "100", **environment}, 120)


SECRET = {"BATON_SECRET": "s"}
UP = ("up", "--http-port", "0", "--grpc-port", "0", "--pool", "process")
WRONG: list[tuple[tuple[str, ...], dict[str, str], str]] = [
    ((*UP, "--redis-url", UNREACHABLE), {}, "no Redis answers at redis://***@127.0.0.1:1 (Error 111"),
    ((*UP, "--redis-url", "p4ssw0rd"), {}, "is not a Redis URL; write for example redis://host:6379"),
    ((*UP, "--kv-memory", "100000GiB"), {}, "--kv-memory 1e+05 GiB for each of 2 ranks is more than"),
    (
        (*UP, "--state-file", "/proc/none/state.json"),
        {},
        "--state-file /proc/none/state.json cannot be written",
    ),
    ((*UP, "--state-file", "/proc"), {}, "--state-file /proc cannot be written (Is a directory)"),
    (("router", "--redis-url", UNREACHABLE), {}, "the deployment's secret is missing"),
    (("router",), SECRET, "redis_url is missing"),
    (("router", "--redis-url", "p4ssw0rd"), SECRET, "is not a Redis URL"),
    (
        ("router", "--redis-url", UNREACHABLE, "--ready-file", "/proc/none/r"),
        SECRET,
        "--ready-file /proc/none/r cannot",
    ),
    (("prefill", "--redis-url", UNREACHABLE), {}, "the deployment's secret is missing"),
    (("decode",), SECRET, "redis_url is missing"),
    (("decode", "--redis-url", "p4ssw0rd"), SECRET, "is not a Redis URL"),
    (("decode", "--redis-url", UNREACHABLE, "--kv-memory", "100000GiB"), SECRET, "more than the"),
]


@pytest.mark.parametrize(("arguments", "environment", "said"), WRONG)
def test_a_sentence_and_no_traceback(arguments, environment, said, checkpoint, tmp_path):
    ended = baton(*arguments, "--model", str(checkpoint("llama")), TMPDIR=str(tmp_path), **environment)
    shown = ended.stdout + ended.stderr
    assert ended.returncode == 1, shown
    assert said in shown
    assert "Traceback" not in shown and "p4ssw0rd" not in shown
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("baton: ") and said.split("(")[0].strip() in last
    assert not list(tmp_path.iterdir()), "nothing is left of a start that started nothing"


def test_a_state_file_that_cannot_be_written_is_refused_at_once(checkpoint):
    with pytest.raises(ConfigError) as caught:
        LocalCluster(UpOptions(checkpoint("llama"), state_file=Path("/proc/none/state.json")))
    assert caught.value.field == "state_file"


def test_a_device_or_a_pipe_is_no_file_to_replace(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(ConfigError, match="it is not a regular file") as caught:
            check_writable(path, "--state-file", "state_file")
        assert caught.value.field == "state_file"
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_the_start_asks_routers_without_the_environments_proxy(checkpoint, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"workers": [{"lease": "live"}, {"lease": "live"}]}')

    with HTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        cluster = LocalCluster(UpOptions(checkpoint("llama"), pool="process"), start_seconds=10.0)
        try:
            cluster._wait_until_ready(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            cluster.stop()


def test_certificates_that_are_wrong_leave_no_folder(checkpoint, monkeypatch, tmp_path):
    certs, temporary = tmp_path / "certs", tmp_path / "temporary"
    make_certs(certs, [], 1)
    (certs / "router.key").write_text("no key")
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(ConfigError, match="TLS files"):
        LocalCluster(UpOptions(checkpoint("llama"), pool="process", certs=certs))
    assert not list(temporary.iterdir())


def test_ctrl_c_while_commands_are_imported_is_no_traceback(tmp_path):
    """In a process of its own, where the import has not happened yet."""
    script = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "baton.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from baton.cli.entry import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_an_output_that_cannot_show_a_character_shows_another(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(cli, "app", lambda: say("KV ░░ – a · b"))
    cli.main()
    sys.stdout.flush()
    assert written.getvalue() == b"KV ?? ? a ? b\n"


# --- a start that fails later --------------------------------------------------------------------------------------


@pytest.fixture
def sleepers(monkeypatch, tmp_path):
    """Replaces routers and workers by processes that write to their logs and never serve."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    script = "import threading; print('loading …', flush=True); threading.Event().wait()"
    monkeypatch.setattr(children, "baton_command", lambda *_: [sys.executable, "-c", script])


def test_the_logs_that_a_time_out_names_are_still_there(sleepers, checkpoint):
    cluster, error = failed_start(checkpoint("llama"))
    assert "did not register within 1 s" in error.message
    named = Path(error.message.rpartition("logs: ")[2])
    assert named == cluster.logs
    cluster.stop(keep_logs=True)
    assert {file.stem.partition("-")[0] for file in named.glob("*.log")} == {"router", "prefill", "decode"}
    assert "loading" in next(named.glob("decode-*.log")).read_text()
    assert list(named.parent.iterdir()) == [named], "configurations hold secrets: they are gone"


def test_a_process_that_ends_at_once_is_shown_and_its_log_is_kept(monkeypatch, sleepers, checkpoint):
    script = "raise SystemExit('no such device')"
    monkeypatch.setattr(children, "baton_command", lambda *_: [sys.executable, "-c", script])
    cluster, error = failed_start(checkpoint("llama"))
    assert "exited with code 1:\nno such device" in error.message
    assert f"logs: {cluster.logs}" in error.message
    cluster.stop(keep_logs=True)
    assert any("no such device" in file.read_text() for file in cluster.logs.iterdir())


def test_a_cancelled_start_leaves_nothing(sleepers, checkpoint):
    cluster, _ = failed_start(checkpoint("llama"))
    cluster.stop()
    assert not cluster.logs.parent.exists()


def test_a_start_without_logs_names_none(sleepers, checkpoint):
    cluster, error = failed_start(checkpoint("llama"), redis_url=UNREACHABLE)
    assert "logs" not in error.message and "redis://***@127.0.0.1:1" in error.message
    cluster.stop(keep_logs=True)
    assert not cluster.logs.parent.exists()


def test_a_state_file_that_fails_later_ends_nothing(sleepers, checkpoint, tmp_path):
    folder = tmp_path / "states"
    options = UpOptions(checkpoint("llama"), pool="process", state_file=folder / "state.json")
    cluster = LocalCluster(options)
    cluster._written = ClusterState("h", "g", RedisState("r", None), [], [], [], 1, "logs")
    folder.rmdir()
    folder.write_text("a file in the folder's place")
    try:
        (said,) = cluster.watch()
        assert "the state file could not be written" in said
        assert cluster.watch() == []
        folder.unlink()
        assert cluster.watch() == []
        assert options.state_file is not None and options.state_file.is_file(), "written as soon as it can be"
    finally:
        if folder.is_file():
            folder.unlink()
        cluster.stop()


def test_the_state_file_of_another_cluster_survives_a_start_that_failed(sleepers, checkpoint, tmp_path):
    """The usual second `baton up` in the same folder, whose ports are taken."""
    file = tmp_path / "state.json"
    file.write_text("of the cluster that runs")
    cluster, _ = failed_start(checkpoint("llama"), state_file=file)
    cluster.stop()
    assert file.read_text() == "of the cluster that runs"


def test_a_cluster_removes_the_state_file_that_it_wrote(sleepers, checkpoint, tmp_path):
    file = tmp_path / "state.json"
    later = ClusterState("h", "g", RedisState("r", None), [], [], [], 1, "logs")
    for replaced in (False, True):
        cluster = LocalCluster(UpOptions(checkpoint("llama"), pool="process", state_file=file))
        ours = replace(later, logs=str(cluster.logs))
        cluster._write_state(ours)
        # As where a signal comes between a write and the note of it
        replace(ours, http="later").write(file)
        if replaced:
            later.write(file)
        cluster.stop()
        assert file.exists() == replaced


def test_a_start_on_a_full_disk_names_the_cause(sleepers, checkpoint, monkeypatch):
    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    cluster = LocalCluster(UpOptions(checkpoint("llama"), pool="process"))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SetupError) as caught:
        cluster.start()
    assert (
        "No space left on device" in caught.value.message and str(cluster.logs.parent) in caught.value.message
    )
    cluster.stop(keep_logs=True)


def test_a_folder_for_temporary_files_that_cannot_be_used_is_named(checkpoint, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    with pytest.raises(SetupError) as caught:
        LocalCluster(UpOptions(checkpoint("llama")))
    assert "/proc/none" in caught.value.message and "TMPDIR" in caught.value.message


# --- the secret ----------------------------------------------------------------------------------------------------


def test_no_configuration_has_a_public_secret(checkpoint):
    model = checkpoint("llama")
    assert RouterConfig(model=model).secret == ""
    assert WorkerConfig(role="decode", engine={"model": model}).secret == ""


@pytest.mark.parametrize("command", [serve.router, serve.prefill, serve.decode])
def test_no_process_starts_without_a_secret(command, checkpoint, monkeypatch):
    monkeypatch.delenv("BATON_SECRET", raising=False)

    def started(process):
        process.close()
        raise AssertionError("it was started")

    monkeypatch.setattr("uvloop.run", started)
    with pytest.raises(ConfigError) as caught:
        command(model=checkpoint("llama"), redis_url=UNREACHABLE)
    assert caught.value.field == "secret"
    assert "openssl rand -hex 32" in caught.value.message


def test_a_worker_of_a_pool_needs_one_too(checkpoint, tmp_path):
    config = WorkerConfig(role="decode", engine={"model": checkpoint("llama")}, redis_url=UNREACHABLE)
    process = subprocess.run(
        [sys.executable, "-m", "baton.ray_pools.supervision.worker_process", str(tmp_path / "socket")],
        input=config.model_dump_json(),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "the deployment's secret is missing" in process.stderr


def test_a_cluster_here_draws_one_for_all_its_processes(sleepers, checkpoint):
    drawn = []
    for _ in range(2):
        cluster, _ = failed_start(checkpoint("llama"), routers=2)
        files = list(cluster.logs.parent.glob("*.json"))
        configs: list[RouterConfig | WorkerConfig] = []
        for file in files:
            if file.stem.startswith("router"):
                configs.append(sources.load(RouterConfig, {}, file))
            else:
                configs.append(sources.load(WorkerConfig, {}, file))
        assert len(configs) == 4
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        (secret,) = {config.secret for config in configs}
        drawn.append(secret)
        cluster.stop()
    assert len(set(drawn)) == 2 and all(len(bytes.fromhex(secret)) >= 16 for secret in drawn)


def test_a_registry_alone_needs_no_secret():
    sources.require_redis(ClusterFields(redis_url=UNREACHABLE))
    with pytest.raises(ConfigError):
        sources.require_redis(ClusterFields())
