"""How `baton up` handles its processes, without starting any."""

from __future__ import annotations

import json
import stat
import subprocess
from functools import partial
from pathlib import Path

import pytest

from baton.local import children, memory, options
from baton.local.children import Child
from baton.local.cluster import LocalCluster
from baton.local.options import UpOptions
from baton.local.state import ClusterState, RedisState
from cluster.errors import ConfigError, SetupError
from cluster.process.memory import Limit

MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster whose children end at once."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def start(name: str, command: list[str], logs: Path, env: object = None) -> Child:
        process = subprocess.Popen(["true"], start_new_session=True)
        process.wait(10)
        return Child(name, process, logs / f"{name}.log")

    monkeypatch.setattr(children, "start", start)
    options = UpOptions(
        MODEL, pool="process", router={"http_port": 0, "grpc_port": 0}, state_file=tmp_path / "state.json"
    )
    made = LocalCluster(options)
    yield made
    made.stop()


def test_a_router_that_dies_again_before_it_serves_keeps_its_addresses(cluster):
    start = partial(
        cluster._start_router, "router-0", cluster._options.router_config(0, "unix:///nowhere", "n", "s")
    )
    config = cluster._dir / "router-0.json"

    def ports() -> tuple[int, int]:
        written = json.loads(config.read_text())
        return written["http_port"], written["grpc_port"]

    start()
    assert ports() == (0, 0)
    facts = {"http": "http://127.0.0.1:4001", "grpc": "127.0.0.1:4002"}
    cluster._ready_file("router-0").write_text(json.dumps(facts))
    for _ in range(3):
        start()
        assert ports() == (4001, 4002)


def test_the_state_file_is_its_owners_and_never_holds_the_password_of_redis(cluster):
    cluster._redis_url = "redis://user:p4ssw0rd@127.0.0.1:1"
    cluster._written = ClusterState("h", "g", RedisState("before", None), [], [], [], 1, "logs")
    cluster._options.state_file.touch(mode=0o644)  # of an earlier start
    assert cluster.watch() == []
    assert stat.S_IMODE(cluster._options.state_file.stat().st_mode) == 0o600
    text = cluster._options.state_file.read_text()
    assert "redis://***@127.0.0.1:1" in text and "p4ssw0rd" not in text


def test_a_redis_that_dies_while_the_cluster_starts_is_noticed(cluster):
    redis = children.start("redis", [], cluster._logs)
    cluster._servers.add(redis)
    redis.log.write_text("no room")
    with pytest.raises(SetupError, match=f"{redis.name} exited with code 0:\\nno room"):
        cluster._poll(lambda: None, "the workers did not register")


def test_stopping_touches_no_process_that_has_the_pid_of_one_that_exited(cluster):
    child = children.start("redis", [], cluster._logs)
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        child.process.pid = other.pid  # as if the kernel had used the number again
        children.stop_all([child], 1.0)
        with pytest.raises(subprocess.TimeoutExpired):  # it lives
            other.wait(0.5)
    finally:
        other.kill()
        other.wait(10)


def test_a_process_that_outlives_its_kill_keeps_no_other_one_from_its_stop(tmp_path, monkeypatch):
    stopped: list[str] = []

    class Process:
        pid = 2**22 + 1  # beyond every process

        def __init__(self, name: str, ends: bool):
            self.name, self.ends = name, ends

        def poll(self) -> None:
            return None

        def terminate(self) -> None:
            stopped.append(self.name)

        def wait(self, seconds: float) -> None:
            if not self.ends:
                raise subprocess.TimeoutExpired(self.name, seconds)

    both = [Child(name, Process(name, name == "b"), tmp_path / name) for name in "ab"]  # type: ignore[arg-type]
    children.stop_all(both, 0.0)
    assert stopped == ["a", "b", "a", "b"]


def test_each_model_has_workers_of_its_own_and_a_name_at_every_router():
    adapters = {"lora": ["x=/adapters/x"], "max_lora_rank": 8}
    given = {"pool": "process", "decode": 2, "worker": {"engine": {"kv_memory_bytes": 1 << 20, **adapters}}}
    up = UpOptions(
        MODEL, also=(f"second={MODEL}",), sections={"router": {"served_model_name": "one"}}, **given
    )
    router = up.router_config(0)
    assert router.model_names == ("one", "second") and router.models[0].model == MODEL
    started = [(role, up.worker_config(role, model=model)) for role, model in up.workers]
    assert [(role, config.served_model_name) for role, config in started] == [
        *(("decode", ""), ("decode", ""), ("decode", "second"), ("decode", "second")),
        *(("prefill", ""), ("prefill", "second")),
    ]
    assert [len(config.engine.lora) for _, config in started] == [1, 1, 0, 0, 1, 0]
    assert all(config.engine.model == MODEL for _, config in started)


@pytest.mark.parametrize(("slots", "kept"), [({"max_loras": 3}, (3, Path("/a"))), ({}, (0, None))])
def test_calls_may_load_adapters_of_each_model_where_slots_are_set(slots, kept):
    engine = {"kv_memory_bytes": 1 << 20, "lora": ["x=/a/x"], **slots}
    given = {"pool": "process", "worker": {"lora_dir": "/a", "engine": engine}}
    up = UpOptions(MODEL, also=(f"second={MODEL}",), **given)
    configs = [up.worker_config(role, model=model) for role, model in up.workers]
    assert [len(one.engine.lora) for one in configs] == [1, 0, 1, 0]
    assert [(one.engine.max_loras, one.lora_dir) for one in configs[1::2]] == [kept, kept]


def test_models_have_parsers_of_their_own_by_the_file_and_no_flag_reaches_them():
    listed = {"name": "third", "model": str(MODEL), "tool_parser": "hermes"}
    given = {"router": {"tool_parser": "mistral"}, "sections": {"router": {"models": [listed]}}}
    router = UpOptions(MODEL, pool="process", also=(f"second={MODEL}",), **given).router_config(0)
    found = {name: one.tool_parser for name, one in router.by_model().items()}
    assert found == {router.served_name: "mistral", "third": "hermes", "second": "auto"}


@pytest.mark.parametrize("flag", [0, 256])
def test_routers_know_the_context_of_further_models_workers(flag):
    """They showed and admitted the checkpoint's own, and workers refused what was longer."""
    entries = [
        {"name": f"m{own}", "model": str(MODEL), **({"max_model_len": own} if own else {})}
        for own in (0, 128)
    ]
    engine = {"kv_memory_bytes": 1 << 20, **({"max_model_len": flag} if flag else {})}
    given = {"pool": "process", "worker": {"engine": engine}, "sections": {"router": {"models": entries}}}
    up = UpOptions(MODEL, also=(f"second={MODEL}",), **given)
    expected = {"m0": flag, "m128": 128, "second": flag}
    assert {one.name: one.max_model_len for one in up.router_config(0).models} == expected
    for role, model in up.workers:
        wanted = flag if model is None else expected[model.name]
        assert up.worker_config(role, model=model).engine.max_model_len == wanted


def test_workers_share_the_memory_with_those_of_other_models(monkeypatch):
    monkeypatch.setattr(memory, "cards", list)
    monkeypatch.setattr(options, "limits", lambda: [Limit(64 << 30, 60 << 30)])
    one, two = (UpOptions(MODEL, pool="process", also=also) for also in ((), (f"second={MODEL}",)))
    shares = [up.worker_config("decode").engine.memory_bytes for up in (one, two)]
    assert shares[1] == shares[0] // 2


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("second", "write NAME=DIR"),
        ("second=/none", "--also second=/none: no such directory"),
        (f"={MODEL}", "write NAME=DIR"),
    ],
)
def test_a_further_model_is_a_name_and_a_directory(also, said):
    with pytest.raises(ConfigError, match=said):
        UpOptions(MODEL, pool="process", also=(also,))


def test_pools_of_ray_are_of_one_model():
    with pytest.raises(ConfigError, match="several models need --pool process"):
        UpOptions(MODEL, also=(f"second={MODEL}",))


def test_the_only_model_has_one_name_at_routers_and_workers():
    up = UpOptions(MODEL, router={"served_model_name": "x"}, worker={"served_model_name": "x"})
    assert up.router_config(0).served_name == "x"
    assert {up.worker_config(role).served_model_name for role, _ in up.workers} == {"x"}
