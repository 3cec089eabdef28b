"""Targets, limits and quotas from the command line reach those who hold them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli import overload, serve, up
from baton.cli.main import app
from baton.local.options import UpOptions
from cluster.config.models import RouterConfig
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


def test_every_flag_is_a_setting_of_the_routers():
    assert set(overload.ROUTER_SETTINGS) == set(GIVEN) <= set(RouterConfig.model_fields)


def test_up_hands_them_to_its_routers_and_workers(checkpoint, monkeypatch):
    asked: list[UpOptions] = []
    monkeypatch.setattr(up, "run", asked.append)
    command = ["up", "--model", str(checkpoint("llama")), *FLAGS, "--batch-aging-seconds", "4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (options,) = asked
    config = options.router_config(0, "", "n", "s")
    assert {name: getattr(config, name) for name in GIVEN} == GIVEN
    assert options.worker_config("prefill", "", "n", "s").batch_aging_seconds == 4
    plain = replace(options, limits={}, batch_aging_seconds=None)
    assert plain.router_config(0, "", "n", "s").ttft_target_seconds_normal == 30
    assert plain.worker_config("decode", "", "n", "s").batch_aging_seconds == 30


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


@pytest.mark.parametrize("limits", [{"ttft_target_seconds_high": -1.0}, {"max_concurrent_requests": 0}])
def test_a_limit_that_makes_no_sense_is_named_before_anything_starts(limits, checkpoint):
    with pytest.raises(ConfigError) as caught:
        UpOptions(checkpoint("llama"), limits=limits)
    assert caught.value.field in limits
    assert f"--{caught.value.field.replace('_', '-')}" in caught.value.message


def test_a_new_keys_limits_are_in_its_entry():
    limits = ["--requests-per-minute", "10", "--tokens-per-minute", "999", "--max-concurrent-requests", "2"]
    result = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme", "--weight", "3", *limits])
    assert result.exit_code == 0, result.output
    (entry,) = yaml.safe_load(result.output)
    assert (entry["requests_per_minute"], entry["tokens_per_minute"]) == (10, 999)
    assert (entry["max_concurrent_requests"], entry["weight"]) == (2, 3)


def test_a_keys_own_limits_go_before_the_routers():
    config = RouterConfig(model="m", requests_per_minute_per_tenant=30, tokens_per_minute_per_tenant=5000)
    gateway: Any = SimpleNamespace(config=config)
    limits = RequestGateway._rate_limits(
        gateway, Caller("acme", rate_limits=RateLimits(requests_per_minute=7))
    )
    assert limits == RateLimits(7, 5000)
    gateway.config = RouterConfig(model="m")
    assert not RequestGateway._rate_limits(gateway, Caller("acme"))
