"""Flags are settings: each reaches the processes that hold it, by its name, with its type and its bounds."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli import serve, up
from baton.cli.main import app
from baton.local import preflight
from baton.local.options import UpOptions
from cluster.config import sources
from cluster.config.base import flags, settings, size_text
from cluster.config.router import RouterConfig
from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import ConfigError
from cluster.security.keys import Caller, RateLimits
from router.gateway import RequestGateway

GIVEN = {
    "ttft_target_seconds_high": 1.5,
    "ttft_target_seconds_normal": 0.0,
    "ttft_target_seconds_batch": 60.0,
    "admission_seconds": 7.0,
    "max_concurrent_requests": 9,
    "max_concurrent_requests_per_tenant": 3,
    "requests_per_minute_per_tenant": 30,
    "tokens_per_minute_per_tenant": 5000,
}
FLAGS = [word for name, value in GIVEN.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> UpOptions:
    """The options of a `baton up` with these arguments."""
    options: list[UpOptions] = []
    monkeypatch.setattr(up, "run", options.append)
    # It listens on the default ports, which any other process may have: those of tests are the system's choice.
    monkeypatch.setattr(preflight, "_check_ports", lambda options: None)
    result = CliRunner().invoke(app, ["up", *arguments])
    assert result.exit_code == 0, result.output or result.exception
    return options[0]


def test_up_hands_them_to_its_routers_and_workers(checkpoint, monkeypatch):
    model = str(checkpoint("llama"))
    options = started(
        monkeypatch, "--model", model, *FLAGS, "--batch-aging-seconds", "4", "--kv-memory", "64MiB"
    )
    config = options.router_config(0, "", "n", "s")
    assert {name: getattr(config, name) for name in GIVEN} == GIVEN
    for role in ("prefill", "decode"):
        of_worker = options.worker_config(role, "", "n", "s")
        assert (of_worker.batch_aging_seconds, of_worker.engine.kv_memory_bytes) == (4, 64 << 20)
    plain = UpOptions(checkpoint("llama"))
    assert plain.router_config(0, "", "n", "s").ttft_target_seconds_normal == 30
    assert plain.worker_config("decode", "", "n", "s").batch_aging_seconds == 30


def test_every_setting_is_a_flag_of_up_or_up_chooses_it(monkeypatch):
    named = {*flags(RouterConfig).values(), *flags(WorkerConfig).values()}
    parameters = set(inspect.signature(up.up).parameters)
    assert named - parameters == up.CHOSEN - parameters
    secrets = {
        one.path[-1] for model in (RouterConfig, WorkerConfig) for one in settings(model) if one.flag is None
    }
    assert secrets == {"secret", "redis_password", "index_password", "fault_orders", "role", "models"}, (
        "no secret is on a command line"
    )


def test_a_file_sets_what_one_role_or_single_processes_have(checkpoint, monkeypatch, tmp_path):
    file = tmp_path / "up.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "router": {"drain_seconds": 1, "max_choices": 3},
                "worker": {"engine": {"threads": 2, "max_batch_tokens": 128}},
                "decode": {"engine": {"max_batch_tokens": 64}, "host": "127.0.0.2"},
            }
        )
    )
    options = started(
        monkeypatch, "--model", str(checkpoint("llama")), "--config", str(file), "--max-choices", "4"
    )
    config = options.router_config(0, "", "n", "s")
    assert (config.drain_seconds, config.max_choices) == (1, 4)
    prefill, decode = (options.worker_config(role, "", "n", "s") for role in ("prefill", "decode"))
    assert (prefill.engine.threads, prefill.engine.max_batch_tokens, prefill.host) == (2, 128, "127.0.0.1")
    assert (decode.engine.threads, decode.engine.max_batch_tokens, decode.host) == (2, 64, "127.0.0.2")
    assert options.worker_environment()["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("content", ["routers: {}", "router: 3"])
def test_a_section_that_does_not_exist_is_refused(content, checkpoint, tmp_path):
    file = tmp_path / "up.yaml"
    file.write_text(content)
    result = CliRunner().invoke(app, ["up", "--model", str(checkpoint("llama")), "--config", str(file)])
    assert isinstance(result.exception, ConfigError) and result.exception.field == "config"


def test_a_variable_sets_what_a_flag_sets(checkpoint, monkeypatch):
    monkeypatch.setenv("BATON_MAX_CHOICES", "5")
    monkeypatch.setenv("BATON_ENGINE__KV_MEMORY_BYTES", "32MiB")
    options = started(monkeypatch, "--model", str(checkpoint("llama")))
    assert options.router_config(0, "", "n", "s").max_choices == 5
    assert options.worker_config("decode", "", "n", "s").engine.kv_memory_bytes == 32 << 20


def test_a_flag_wins_over_a_variable_in_the_processes_too(checkpoint, monkeypatch):
    """Those read their environment after their files: what `baton up` has read from it is not handed on."""
    monkeypatch.setenv("BATON_HTTP_PORT", "18001")
    monkeypatch.setenv("BATON_NAMESPACE", "elsewhere")
    monkeypatch.setenv("BATON_ENGINE", '{"threads": 2}')
    monkeypatch.setenv("BATON_REDIS_PASSWORD", "of another")
    monkeypatch.setenv("BATON_PORT", "tcp://10.0.0.1:80")  # Kubernetes' own, beside a Service called baton
    monkeypatch.setenv("BATON_FAULT_ORDERS", "/a/test's/own")
    options = started(monkeypatch, str(checkpoint("llama")), "--http-port", "18005", "--routers", "2")
    assert [options.router_config(index, "", "n", "s").http_port for index in (0, 1)] == [18005, 18006]
    assert options.router_config(0, "redis://r", "n", "s").redis_password == ""
    assert options.worker_config("decode", "", "n", "s").engine.threads == 2
    assert [one for one in os.environ if one.startswith("BATON_")] == ["BATON_FAULT_ORDERS"]


def test_a_variable_gives_the_ports_of_all_routers(checkpoint, monkeypatch):
    monkeypatch.setenv("BATON_HTTP_PORT", "18001")
    monkeypatch.setenv("BATON_MODEL_ALIASES", '["one", "two"]')
    options = started(monkeypatch, str(checkpoint("llama")), "--routers", "2")
    assert [options.router_config(index, "", "n", "s").http_port for index in (0, 1)] == [18001, 18002]
    assert options.router_config(0, "", "n", "s").model_aliases == ("one", "two")


def test_an_empty_variable_gives_nothing(checkpoint, monkeypatch):
    for name in (
        "BATON_HTTP_PORT",
        "BATON_API_KEYS_FILE",
        "BATON_ENGINE__THREADS",
        "BATON_ENGINE",
        "BATON_MODEL",
    ):
        monkeypatch.setenv(name, "")
    options = started(monkeypatch, str(checkpoint("llama")))
    assert (options.router, options.worker) == ({}, {})
    assert not [one for one in os.environ if one.startswith("BATON_")]


WRONG_VARIABLES = {
    ("BATON_ENGINE", '{"dtype": "bf17"}'): "BATON_ENGINE: dtype: Input should be 'auto', 'float32' or",
    ("BATON_ENGINE", '{"dtype": '): "BATON_ENGINE must be JSON, as {…} or […]",
    ("BATON_ENGINE", "[]"): "BATON_ENGINE: Input must be JSON, as {…}",
    ("BATON_ENGINE__DTYPE", "bf17"): "BATON_ENGINE__DTYPE: Input should be 'auto', 'float32' or",
    ("BATON_ENGINE__DTIPE", "bf17"): "BATON_ENGINE__DTIPE: there is no setting engine.dtipe; write engine.dtype",
    ("BATON_MAX_ATTEMPTS", "x"): "BATON_MAX_ATTEMPTS: Input should be a valid integer",
    ("BATON_ENGINE__MODEL", "/m"): "BATON_ENGINE__MODEL is set, which baton up does not read: unset it, and use baton",
    ("BATON_TLS_KEY", "/m"): "unset it, and use --certs",
}  # fmt: skip


@pytest.mark.parametrize("variable", WRONG_VARIABLES)
def test_a_wrong_variable_is_named_before_anything_starts(variable, checkpoint, monkeypatch):
    monkeypatch.setenv(*variable)
    monkeypatch.setattr(up, "run", lambda options: pytest.fail("a cluster was started"))
    result = CliRunner().invoke(app, ["up", str(checkpoint("llama"))])
    assert isinstance(result.exception, ConfigError)
    assert WRONG_VARIABLES[variable] in result.exception.message


def test_a_router_takes_them_too(checkpoint, monkeypatch, redis_url):
    asked: list[RouterConfig] = []

    async def run(config: RouterConfig, ready_file: Any) -> None:
        asked.append(config)

    monkeypatch.setattr(serve, "_run_router", run)
    monkeypatch.setenv("BATON_SECRET", "s")
    named = ["--model", str(checkpoint("llama")), "--redis-url", redis_url]
    result = CliRunner().invoke(app, ["router", *named, *FLAGS])
    assert result.exit_code == 0, result.output
    assert {name: getattr(asked[0], name) for name in GIVEN} == GIVEN


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_has_its_nested_settings_as_flags(role, checkpoint, monkeypatch):
    started: list[WorkerConfig] = []

    async def run(config: WorkerConfig, ready_file: Any) -> None:
        started.append(config)

    monkeypatch.setattr(serve, "_run_worker", run)
    monkeypatch.setenv("BATON_SECRET", "s")
    monkeypatch.setenv("NODE_NAME", "node-7")
    named = ["--model", str(checkpoint("llama")), "--redis-url", "unix:///nowhere"]
    more = [
        "--transport",
        "grpc",
        "--no-prefix-caching",
        "--ring-bytes",
        "1MiB",
        "--topology-host",
        "h",
        "--host",
        "::1",
    ]
    result = CliRunner().invoke(app, [role, *named, *more])
    assert result.exit_code == 0, result.output
    (config,) = started
    assert (config.role, config.host, config.topology.host, config.topology.node_name) == (
        role,
        "::1",
        "h",
        "node-7",
    )
    assert (config.transfer.transport, config.transfer.ring_bytes) == ("grpc", 1 << 20)
    assert not config.engine.prefix_caching and config.engine.chunked_prefill


@pytest.mark.parametrize("limits", [{"ttft_target_seconds_high": -1.0}, {"max_concurrent_requests": 0}])
def test_an_invalid_limit_is_named_before_anything_starts(limits, checkpoint):
    with pytest.raises(ConfigError) as caught:
        UpOptions(checkpoint("llama"), router=limits)
    assert caught.value.field in limits
    assert f"--{caught.value.field.replace('_', '-')}" in caught.value.message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 10**6),
        ("512MiB", 512 << 20),
        ("2gib", 2 << 30),
        ("1.5 TiB", 3 << 39),
        ("2TB", 2 * 10**12),
        ("7 b", 7),
    ],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert EngineConfig(model=Path("m"), kv_memory_bytes=text).kv_memory_bytes == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 tit", "much", "inf", "-inf", "infGiB", "1e400", "nan", "-1", "-1GiB", "1GiBGiB"]
)
def test_an_invalid_size_is_refused(text, monkeypatch):
    with pytest.raises(ConfigError, match=r"write for example 512MiB|greater than or equal to 0") as caught:
        sources.load(WorkerConfig, {"role": "decode", "engine": {"model": "m", "kv_memory_bytes": text}})
    assert caught.value.field == "engine.kv_memory_bytes"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1000, "1000 B"), (1 << 20, "1 MiB"), (3 << 39, "1536 GiB")]
)
def test_a_size_is_shown_with_its_unit(size, text):
    assert size_text(size) == text


def test_a_new_keys_limits_are_in_its_entry():
    limits = ["--requests-per-minute", "10", "--tokens-per-minute", "999", "--max-concurrent-requests", "2"]
    result = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme", "--weight", "3", *limits])
    assert result.exit_code == 0, result.output
    (entry,) = yaml.safe_load(result.output)
    assert (entry["requests_per_minute"], entry["tokens_per_minute"]) == (10, 999)
    assert (entry["max_concurrent_requests"], entry["weight"]) == (2, 3)


def test_a_new_keys_limit_of_0_is_the_default_but_no_weight_is_0():
    result = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme", "--requests-per-minute", "0"])
    (entry,) = yaml.safe_load(result.output)
    assert "requests_per_minute" not in entry
    refused = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme", "--weight", "0"])
    assert isinstance(refused.exception, ConfigError) and "weight" in str(refused.exception)


@pytest.mark.parametrize("days", ["-1", "999999999"])
def test_a_key_neither_has_ended_already_nor_lasts_beyond_the_calendar(days):
    result = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme", "--days", days])
    assert result.exit_code == 2 and "--days" in result.output


@pytest.mark.parametrize("tenant", ["a\nb", "a\x85b", "a\u2028- {admin: true}", "a\x9b2J"])
def test_a_tenants_name_that_none_may_have_is_one_sentence(tenant):
    """Neither in a file to which a new key's entry is added, nor in a terminal, does a name end its line."""
    result = CliRunner().invoke(app, ["keys", "new", "--tenant", tenant])
    assert isinstance(result.exception, ConfigError) and result.exception.field == "tenant"
    assert "\n" not in result.exception.message and "pydantic" not in result.exception.message


def test_a_keys_own_limits_go_before_the_routers():
    config = RouterConfig(model="m", requests_per_minute_per_tenant=30, tokens_per_minute_per_tenant=5000)
    gateway: Any = SimpleNamespace(config=config)
    limits = RequestGateway._rate_limits(
        gateway, Caller("acme", rate_limits=RateLimits(requests_per_minute=7))
    )
    assert limits == RateLimits(7, 5000)
    gateway.config = RouterConfig(model="m")
    assert not RequestGateway._rate_limits(gateway, Caller("acme"))
