"""The application that is sent to an external Ray cluster."""

from __future__ import annotations

import atexit
import math
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.cli import pools
from baton.cli.pools import beside, with_secrets
from baton.ray_pools import deploy
from baton.ray_pools.serve_app import AppArguments, build
from cluster.errors import ConfigError, DeadlineError, SetupError, UnavailableError

OURS = {
    "proxy_location": "Disabled",
    "applications": [{"name": "baton", "import_path": "baton.ray_pools.serve_app:build"}],
}


def test_secrets_come_from_the_environment_only() -> None:
    made = with_secrets(OURS, {"BATON_SECRET": "s", "BATON_REDIS_URL": "redis://r", "OTHER": "x"})
    assert made["applications"][0]["runtime_env"] == {
        "env_vars": {"BATON_SECRET": "s", "BATON_REDIS_URL": "redis://r"}
    }
    also = {"BATON_SECRET": "s", "BATON_REDIS_URL": "redis://r", "BATON_INDEX_URL": "redis://i"}
    assert with_secrets(OURS, also)["applications"][0]["runtime_env"] == {"env_vars": also}
    with pytest.raises(ConfigError, match="BATON_REDIS_URL is not set"):
        with_secrets(OURS, {"BATON_SECRET": "s"})


def test_applications_of_others_stay() -> None:
    theirs = {"name": "theirs", "import_path": "theirs:app"}
    details = {
        "applications": {
            "theirs": {"deployed_app_config": theirs},
            "baton": {"deployed_app_config": {"name": "baton", "import_path": "old"}},
            "by hand": {"deployed_app_config": None},
        }
    }
    assert beside(details, OURS) == {"applications": [theirs, *OURS["applications"]]}
    assert beside(details, {"applications": []}, without="baton") == {"applications": [theirs]}
    assert beside({"applications": {}}, OURS) == OURS


def wait_running(monkeypatch: pytest.MonkeyPatch, *states: str, seconds: float = 20.0) -> None:
    """By a dashboard that shows these states, of which the last one stays."""
    shown = list(states)

    def details() -> dict[str, Any]:
        status = shown.pop(0) if len(shown) > 1 else shown[0]
        return {"applications": {"baton": {"status": status, "message": "no GPU"}} if status else {}}

    monkeypatch.setattr(pools, "POLL_SECONDS", 0.0)
    pools._wait_running("http://h:1", SimpleNamespace(get_serve_details=details), ["baton"], seconds)


def test_an_application_is_waited_for_until_it_runs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_running(monkeypatch, "", "DEPLOYING", "RUNNING")
    for failure in ("DEPLOY_FAILED", "UNHEALTHY"):
        with pytest.raises(SetupError, match="baton does not start: no GPU"):
            wait_running(monkeypatch, "DEPLOYING", failure)
    with pytest.raises(DeadlineError, match="did not run within 0 s") as raised:
        wait_running(monkeypatch, "DEPLOYING", seconds=0.0)
    assert raised.value.field == "seconds"


def test_arguments_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"decode\.replicas"):
        build({"prefill": {"replicas": 1, "config": {}}, "decode": {"replicas": -1, "config": {}}})
    with pytest.raises(ValidationError):
        AppArguments.model_validate({"prefill": {}})


def test_a_dashboard_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "DASHBOARD_SECONDS", 0.05)
    never = threading.Event()
    with pytest.raises(UnavailableError, match="http://head:8265 has not responded") as raised:
        pools._ask("http://head:8265", never.wait)
    assert raised.value.field == "dashboard"
    never.set()
    assert pools._ask("http://head:8265", lambda: 3) == 3


def test_pools_whose_head_hangs_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serve's own shutdown would wait for it; so would Ray's exit handler, hence an exit before it."""
    handlers: list[object] = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr("baton.ray_pools.deploy.shutdown", lambda: pytest.fail("it would wait"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    silent: Any = SimpleNamespace(
        why_silent="Ray's head at h:1 has not responded for 9 s", close=lambda: None
    )
    pools._disconnect("h:1", silent, has_pools=True)
    assert handlers == [pools._exit_at_once]
    assert "the pools stay as they are: Ray's head at h:1" in capsys.readouterr().out


def test_an_end_that_blocks_while_the_head_responds_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So has a deployment that does not see the signal."""
    handlers: list[object] = []
    never = threading.Event()
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr("cluster.ray_head.RayHeadWatch._run", lambda _: None)  # as while it responds
    monkeypatch.setattr(pools, "END_SECONDS", 0.05)
    monkeypatch.setattr(pools, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(deploy, "shutdown", never.wait)
    monkeypatch.setattr(deploy, "deploy", lambda *_: never.wait())
    watch: Any = SimpleNamespace(why_silent="", close=lambda: None)
    pools._disconnect("h:1", watch, has_pools=True)
    assert handlers == [pools._exit_at_once]
    assert "the end of the pools by Ray's head at h:1 did not end within" in capsys.readouterr().out
    stop = threading.Event()
    stop.set()
    with pytest.raises(SetupError, match="the deployment of the pools was stopped"):
        pools._deploy("h:1", {}, {}, stop)
    never.set()


class NoAnswer(Exception):
    """As Ray's GetTimeoutError."""


class Serve:
    """Serve's controller: found by its name until `turns` shutdowns were asked for. One that hangs answers nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, turns: float, *, hangs: bool = False):
        self.turns, self.asked, self.is_connected, self.hangs = turns, 0, True, hangs
        monkeypatch.setattr(deploy, "POLL_SECONDS", 0.0)
        modules: dict[str, dict[str, Any]] = {
            "ray": {"shutdown": self.disconnect, "get_actor": self.find, "get": self.answer},
            "ray.exceptions": {"GetTimeoutError": NoAnswer, "RayActorError": ConnectionError},
            "ray.serve._private.constants": {"SERVE_CONTROLLER_NAME": "it", "SERVE_NAMESPACE": "serve"},
        }
        for name, content in modules.items():
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))

    def find(self, name: str, namespace: str) -> SimpleNamespace:
        assert (name, namespace) == ("it", "serve")
        if self.asked >= self.turns:
            raise ValueError("no such actor")
        calls = ("graceful_shutdown", "check_alive")
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=lambda name=name: self.ask(name)) for name in calls}
        )

    def ask(self, name: str) -> str:
        self.asked += name == "graceful_shutdown"
        return name

    def answer(self, call: str, *, timeout: float) -> None:
        """Never without a limit."""
        assert 0 <= timeout <= deploy.SHUTDOWN_SECONDS
        if self.hangs:
            raise NoAnswer
        if call == "graceful_shutdown":
            raise ConnectionError("it has ended")

    def disconnect(self) -> None:
        self.is_connected = False


@pytest.mark.parametrize("turns", [0, 1, 2], ids=["none there", "it ends", "it starts again, then ends"])
def test_the_end_of_the_pools_is_that_of_their_controller(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = Serve(monkeypatch, turns)
    deploy.shutdown()
    assert serve.asked == turns and not serve.is_connected


def test_a_controller_that_hangs_fails_the_end_of_the_pools(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray itself would say that there is nothing to shut down, and the exit code would be 0."""
    handlers: list[object] = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr("cluster.ray_head.RayHeadWatch._run", lambda _: None)  # as while the head responds
    monkeypatch.setattr(deploy, "SHUTDOWN_SECONDS", 0.01)
    Serve(monkeypatch, math.inf, hangs=True)
    watch: Any = SimpleNamespace(why_silent="", close=lambda: None)
    pools._disconnect("h:1", watch, has_pools=True)
    assert handlers == [pools._exit_at_once]
    said = capsys.readouterr().out
    assert "the pools stay as they are: Serve's controller has not ended them within" in said
    assert "ray::ServeController" in said


def test_a_controller_that_hangs_fails_a_deployment_before_serve_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = threading.Event()
    Serve(monkeypatch, 0)
    deploy.reach_controller(stop)  # there is none
    Serve(monkeypatch, 1)
    deploy.reach_controller(stop)
    monkeypatch.setattr(deploy, "CONTROLLER_SECONDS", 0.01)
    Serve(monkeypatch, 1, hangs=True)
    with pytest.raises(SetupError, match=r"Serve's controller has not responded .* ray::ServeController"):
        deploy.reach_controller(stop)
    monkeypatch.setattr(deploy, "CONTROLLER_SECONDS", math.inf)
    stop.set()
    with pytest.raises(SetupError, match="the deployment of the pools was stopped"):
        deploy.reach_controller(stop)


@pytest.mark.parametrize("signalled", [True, False])
def test_a_signal_while_pools_are_deployed_is_no_error(
    signalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[int] = []

    def connected(address: str, stop: threading.Event) -> str:
        handled.clear()
        if signalled:
            stop.set()
        return "h:1"

    def deploy(*_: object) -> None:
        raise SetupError("the deployment of the pools was stopped")

    ended: list[tuple[str, bool]] = []
    watch = SimpleNamespace(why_silent="", close=lambda: None)
    (tmp_path / "pools").write_text("{}")
    monkeypatch.setattr(signal, "signal", lambda number, _: handled.append(number))
    monkeypatch.setattr(pools, "_connect", connected)
    monkeypatch.setattr(pools, "_pools", lambda described: {})
    monkeypatch.setattr(pools, "RayHeadWatch", lambda *_, **__: watch)
    monkeypatch.setattr(pools, "_reach", lambda head, stop: None)
    monkeypatch.setattr(pools, "_deploy", deploy)
    monkeypatch.setattr(pools, "_disconnect", lambda head, watch, has_pools: ended.append((head, has_pools)))
    with nullcontext() if signalled else pytest.raises(SetupError):
        pools.pools(tmp_path / "pools")
    assert ended == [("h:1", True)]
    assert signal.SIGTERM in handled, "behind Ray's, which would abort the process while the pools end"


@pytest.mark.parametrize("deployed", [True, False])
def test_pools_that_run_already_are_only_kept_and_ended(
    deployed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of Ray's own is a sentence, and ends what was deployed so far."""
    calls: list[str] = []

    def deploy(*_: object) -> None:
        calls.append("deploy")
        raise RuntimeError("no room")

    def connected(address: str, stop: threading.Event) -> str:
        stop.set()
        return "h:1"

    (tmp_path / "pools").write_text("{}")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(pools, "_connect", connected)
    monkeypatch.setattr(pools, "_pools", lambda described: {})
    monkeypatch.setattr(pools, "RayHeadWatch", lambda *_, **__: None)
    monkeypatch.setattr(pools, "_reach", lambda head, stop: calls.append("reach"))
    monkeypatch.setattr(pools, "_deploy", deploy)
    monkeypatch.setattr(pools, "_disconnect", lambda *_, has_pools: calls.append(f"end {has_pools}"))
    with nullcontext() if deployed else pytest.raises(SetupError, match="the pools did not start: no room"):
        pools.pools(tmp_path / "pools", deployed=deployed)
    assert calls == (["end True"] if deployed else ["reach", "deploy", "end True"])


@pytest.mark.parametrize("signalled", [True, False])
def test_a_start_that_deployed_nothing_asks_for_no_end(
    signalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's controller may hang, or serve others."""
    stops: list[threading.Event] = []

    def connected(address: str, stop: threading.Event) -> str:
        stops.append(stop)
        return "h:1"

    def reach(stop: threading.Event) -> None:
        if signalled:
            stop.set()
        raise SetupError("Serve's controller has not responded")

    def asked_to_end() -> None:
        pytest.fail("it asks for an end of what it has not deployed")

    connections = ["ray"]
    (tmp_path / "pools").write_text("{}")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("cluster.ray_head.RayHeadWatch._run", lambda _: None)  # as while the head responds
    monkeypatch.setattr(pools, "_connect", connected)
    monkeypatch.setattr(pools, "_pools", lambda described: {})
    monkeypatch.setattr(deploy, "reach_controller", reach)
    monkeypatch.setattr(deploy, "shutdown", asked_to_end)
    monkeypatch.setattr(deploy, "disconnect", connections.clear)
    with nullcontext() if signalled else pytest.raises(SetupError, match="has not responded"):
        pools.pools(tmp_path / "pools")
    assert connections == []


def test_a_signal_before_ray_is_reached_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: str, stop: threading.Event) -> str:
        stop.set()
        raise SetupError("stopped before Ray's head responded")

    (tmp_path / "pools").write_text("{}")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(pools, "_pools", lambda described: {})
    monkeypatch.setattr(pools, "_connect", connect)
    pools.pools(tmp_path / "pools")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("at", ["before", "start", "ask", "status", "never"])
def test_nothing_is_deployed_once_a_signal_has_come(
    at: str, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the signal meets the deployment: when that returns, the end of the pools may begin."""
    stop, calls = threading.Event(), []

    def did(what: str) -> None:
        calls.append(what)
        if what == at:
            stop.set()

    states = iter(["DEPLOYING", "DEPLOYING", "RUNNING"])

    def status(name: str) -> Any:
        did("status")
        return SimpleNamespace(app_status=SimpleNamespace(status=next(states), message=""))

    client = SimpleNamespace(get_serve_status=status)
    serve = SimpleNamespace(start=lambda **_: did("start"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    monkeypatch.setitem(sys.modules, "ray.serve.api", SimpleNamespace(_run=lambda *_, **__: did("ask")))
    monkeypatch.setitem(
        sys.modules, "ray.serve._private.api", SimpleNamespace(_get_global_client=lambda: client)
    )
    monkeypatch.setattr(deploy, "application", lambda *_: None)
    monkeypatch.setattr(deploy, "_deploy_scaled", lambda *_: did("ask"))
    monkeypatch.setattr(deploy, "POLL_SECONDS", 0)
    did("before")
    with nullcontext() if at == "never" else pytest.raises(SetupError, match="was stopped"):
        deploy.deploy({}, {}, ServeAutoscalingConfig() if scaled else None, stop)
    whole = ["before", "start", "ask", "status", "status", "status"]
    assert calls == (whole if at == "never" else whole[: whole.index(at) + 1 + (at == "ask")])
