"""Settings of a pod: environment below flags, secrets from files, and the errors for wrong values."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.cli import drain, pools
from baton.cli.autoscale import AutoscaleConfig
from baton.local.options import merged
from cluster.addresses import advertised, join
from cluster.config import sources
from cluster.config.base import Frozen, settings
from cluster.config.environment import from_environment
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig
from cluster.config.yaml_file import read_settings
from cluster.errors import ConfigError
from cluster.protocol.block_hash import hash_blocks

FLAGS = {"role": "decode", "engine": {"model": Path("/m")}}


def load(monkeypatch: pytest.MonkeyPatch, **environment: str) -> WorkerConfig:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return sources.load(WorkerConfig, FLAGS)


def test_every_field_comes_from_the_environment_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(
        monkeypatch,
        BATON_HOST="0.0.0.0",
        BATON_ADVERTISE_HOST="10.1.2.3",
        BATON_METRICS_PORT="9090",
        BATON_WORKER_ID="decode-0",
        BATON_DRAIN_SECONDS="12.5",
        BATON_ENGINE__MODEL="/elsewhere",
        BATON_ENGINE__KV_MEMORY_BYTES="1048576",
        BATON_TRANSFER__PORT_RANGE="41000-41063",
    )
    assert (config.host, config.advertise_host, config.metrics_port) == ("0.0.0.0", "10.1.2.3", 9090)
    assert (config.worker_id, config.drain_seconds) == ("decode-0", 12.5)
    assert config.engine.model == Path("/m")
    assert config.engine.kv_memory_bytes == 1 << 20
    assert config.transfer.port_range == "41000-41063"


def test_sizes_of_hand_offs_that_nobody_gave_stay_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through every layer of the settings, and as text for a child process."""
    config = load(monkeypatch, BATON_TRANSFER__RING_BYTES="314572800")
    read = WorkerConfig.model_validate(config.model_dump(mode="json"))
    for transfer in (config.transfer, read.transfer):
        assert (transfer.for_gpus().slot_bytes, transfer.for_gpus().ring_bytes) == (16 << 20, 300 << 20)
        assert transfer.slot_bytes == 4 << 20


@pytest.mark.parametrize("layer", ["flags", "values", "file"])
def test_prefill_workers_ignore_an_environment_with_speculation(layer, tmp_path, monkeypatch) -> None:
    """`baton up` passes its own on to every worker."""
    monkeypatch.setenv("BATON_ENGINE__SPECULATION", "ngram")
    monkeypatch.setenv("BATON_ENGINE__SPECULATIVE_TOKENS", "6")
    monkeypatch.setenv("BATON_ENGINE__PAGE_SIZE", "32")

    def of(role: str, **engine: str) -> WorkerConfig:
        given = {"role": role, "engine": {"model": "/m", **engine}}
        if layer == "file":
            (tmp_path / "worker.yaml").write_text(json.dumps(given))
            return sources.load(WorkerConfig, {}, tmp_path / "worker.yaml")
        return sources.load(WorkerConfig, given if layer == "flags" else {}, values=given)

    assert (of("decode").engine.most_drafts, of("decode").engine.page_size) == (6, 32)
    assert (of("prefill").engine.most_drafts, of("prefill").engine.page_size) == (0, 32)
    with pytest.raises(ConfigError, match="--speculation ngram has no effect on a prefill worker"):
        of("prefill", speculation="ngram")


@pytest.mark.parametrize(("role", "drafts"), [("prefill", 0), ("decode", 6)])
@pytest.mark.parametrize("elsewhere", ["", "prefill", "decode"])
def test_the_role_that_the_environment_names_decides_about_its_speculation(
    role, drafts, elsewhere, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("BATON_ROLE", role)
    monkeypatch.setenv("BATON_ENGINE__SPECULATION", "ngram")
    monkeypatch.setenv("BATON_ENGINE__SPECULATIVE_TOKENS", "6")
    below = {"role": elsewhere} if elsewhere else {}
    (tmp_path / "worker.yaml").write_text(json.dumps({"engine": {"model": "/m"}, **below}))
    config = sources.load(WorkerConfig, {}, tmp_path / "worker.yaml", values=below)
    assert (config.role, config.engine.most_drafts) == (role, drafts)
    if elsewhere:
        above = sources.load(WorkerConfig, below, tmp_path / "worker.yaml")
        assert (above.role, above.engine.most_drafts) == (elsewhere, 6 if elsewhere == "decode" else 0)


def test_values_that_were_read_already_stand_below_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ADVERTISE_HOST", "10.9.9.9")
    values = {"role": "prefill", "engine": {"model": "/m"}, "advertise_host": "", "drain_seconds": 7}
    config = sources.load(WorkerConfig, {}, values=values)
    assert (config.advertise_host, config.drain_seconds, config.role) == ("10.9.9.9", 7, "prefill")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://r:6379/0", "redis://:p%2Fw%40d@r:6379/0"),
        ("rediss://user@r:6379", "rediss://user:p%2Fw%40d@r:6379"),
        ("unix:///run/r.sock", "unix:///run/r.sock?password=p%2Fw%40d"),
    ],
)
def test_secrets_are_read_from_files(
    url: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, secret = tmp_path / "password", tmp_path / "secret"
    password.write_text("p/w@d\n")
    secret.write_text("deployment")
    config = load(
        monkeypatch,
        BATON_REDIS_URL=url,
        BATON_REDIS_PASSWORD_FILE=str(password),
        BATON_INDEX_URL=url,
        BATON_INDEX_PASSWORD_FILE=str(password),
        BATON_SECRET_FILE=str(secret),
    )
    assert (config.redis_url, config.index_url, config.secret) == (expected, expected, "deployment")
    assert "p/w@d" not in repr(config) and "p%2Fw" not in repr(config)
    # What is shipped to replicas is complete, and resolving it again changes nothing.
    assert sources.load(WorkerConfig, {}, values=config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"BATON_SECRET_FILE": "/nowhere"}, "secret_file"),
        ({"BATON_REDIS_URL": "redis://:one@r", "BATON_REDIS_PASSWORD": "two"}, "redis_password"),
        ({"BATON_REDIS_PASSWORD": "two"}, "redis_url"),
        ({"BATON_INDEX_URL": "redis://:one@r", "BATON_INDEX_PASSWORD": "two"}, "index_password"),
        ({"BATON_INDEX_PASSWORD": "two"}, "index_url"),
        ({"BATON_INDEX_URL": "http://r"}, "index_url"),
        ({"BATON_TRANSFER__PORT_RANGE": "many"}, "transfer.port_range"),
        ({"BATON_OTLP_ENDPOINT": "collector:4318"}, "otlp_endpoint"),
        ({"BATON_ENGINE__DEVICE": "cuda:99999999999"}, "engine.device"),
        ({"BATON_ENGINE__MAX_BATCH_TOKENS": "1000000000"}, "engine.max_batch_tokens"),
    ],
)
def test_a_mistake_is_named(environment: dict[str, str], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        load(monkeypatch, **environment)
    assert caught.value.field == field and ("redis_" not in caught.value.message or "index" not in field)


NO_SETTINGS: dict[str, bytes] = {
    "unfinished": b"secret: s3cret\nhost: [",
    "tabs": b"secret: s3cret\nhost:\n\t- x",
    "a list": b"- model",
    "a word": b"model",
    "a number": b"7",
    "true": b"true",
    "a number as a name": b"1: 2",
    "a list as a name": b"? [1]\n: 2",
    "two documents": b"model: x\n---\nmodel: y",
    "an object of Python's": b"!!python/object:os.system 1",
    "bytes": bytes(range(256)),
    "utf-16": "model: x".encode("utf-16"),
    "a zero": b"model: \0",
    "no day": b"model: 2026-02-31",
}


@pytest.mark.parametrize("content", NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_a_file_that_holds_no_settings_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    for read in (partial(sources.load, RouterConfig, {}), drain._of_registry, pools._read_applications):
        with pytest.raises(ConfigError) as caught:
            read(file)
        assert caught.value.field == "config"
        assert str(file) in caught.value.message and "s3cret" not in caught.value.message


@pytest.mark.parametrize("name", ["missing.yaml", "", "n" * 5000, "a\0b"])
def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at"):
        sources.load(RouterConfig, {}, tmp_path / name)


@pytest.mark.parametrize("nothing", ["", "# nothing yet", "null"])
def test_an_empty_file_sets_nothing(nothing: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(nothing)
    assert sources.load(RouterConfig, {"model": Path("/m")}, file).model == Path("/m")


@pytest.mark.parametrize("name", ["a\U0001f680b", "\u00e9", "\ud83d", "\ud83d \ude80"])
def test_a_name_in_a_file_is_that_which_json_wrote(name: str, tmp_path: Path) -> None:
    """`baton up` passes settings to its processes so. Half of a pair may be a byte of a file name that is not UTF-8."""
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"served_model_name": name, name: [name]}))
    assert read_settings(file) == {"served_model_name": name, name: [name]}


@pytest.mark.parametrize("said", ["*", "{", "https://chat.example"])
def test_a_list_in_the_environment_is_json(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CORS_ORIGINS", said)
    with pytest.raises(ConfigError, match="BATON_CORS_ORIGINS must be JSON") as caught:
        sources.load(RouterConfig, {"model": Path("/m")})
    assert caught.value.field == "cors_origins"


def test_an_empty_secret_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load(monkeypatch, BATON_SECRET_FILE=str(tmp_path / "secret"))


@pytest.mark.parametrize("secret", [64 * "x" + "y", 33 * "é", "\udcff"])
def test_a_secret_that_cannot_be_a_key_is_refused_at_the_start(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_SECRET", secret)
    with pytest.raises(ConfigError, match="UTF-8 and at most 64 bytes") as caught:
        sources.load(RouterConfig, {"model": Path("/m")})
    assert secret not in caught.value.message


def test_the_longest_secret_keys_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SECRET", 32 * "é")
    secret = sources.load(RouterConfig, {"model": Path("/m")}).secret
    assert hash_blocks(bytes(64), 16, secret=secret.encode(), salt=b"")


def test_a_service_link_of_kubernetes_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks: false"):
        load(monkeypatch, BATON_PORT="tcp://10.0.0.1:8000")


def test_a_router_takes_the_same_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("s3")
    monkeypatch.setenv("BATON_SECRET_FILE", str(tmp_path / "secret"))
    assert sources.load(RouterConfig, {"model": tmp_path}).secret == "s3"


def test_a_wildcard_address_is_replaced_by_the_one_that_reaches_redis() -> None:
    assert advertised("0.0.0.0", "", "redis://127.0.0.1:6379") == "127.0.0.1"
    assert advertised("0.0.0.0", "10.0.0.7", "redis://127.0.0.1:6379") == "10.0.0.7"
    assert advertised("0.0.0.0", "", "unix:///tmp/redis.sock") == "127.0.0.1"
    assert advertised("10.0.0.5", "", "redis://127.0.0.1:6379") == "10.0.0.5"
    assert advertised("::", "", "redis://no-such-host.invalid:1") == "::1"


def test_addresses_of_both_families() -> None:
    assert join("10.0.0.1", 80) == "10.0.0.1:80"
    assert join("fd00::1", 80) == "[fd00::1]:80"


REQUIRED: dict[type[Frozen], dict[str, Any]] = {
    RouterConfig: {"model": "/m"},
    WorkerConfig: FLAGS,
    AutoscaleConfig: {},
}


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("model", REQUIRED, ids=lambda model: model.__name__)
def test_a_number_is_finite(model: type[Frozen], number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a flag and by the environment, for one process and for `baton up`."""
    floats = [one for one in settings(model) if "float" in str(one.field.annotation)]
    assert floats
    for one in floats:
        nested: Any = number
        for name in reversed(one.path):
            nested = {name: nested}
        with pytest.raises(ConfigError) as caught:
            sources.load(model, merged(REQUIRED[model], nested))
        assert caught.value.field == ".".join(one.path)
        with monkeypatch.context() as patched:
            patched.setenv(one.environment, number)
            with pytest.raises(ConfigError, match=one.environment):
                from_environment(model)


@pytest.mark.parametrize("name", ["w1\n", "w" * 1025, "\udcff", "a\0b"])
def test_a_name_that_routers_pass_over_is_refused(name: str) -> None:
    """The worker was ready, and got no request."""
    for model, setting in ((WorkerConfig, "worker_id"), (RouterConfig, "router_id")):
        with pytest.raises(ConfigError, match="printable") as caught:
            sources.load(model, {**REQUIRED[model], setting: name})
        assert caught.value.field == setting


@pytest.mark.parametrize("model", REQUIRED, ids=lambda model: model.__name__)
def test_an_empty_address_is_refused(model: type[Frozen]) -> None:
    """A socket takes it for every address of the machine."""
    with pytest.raises(ConfigError, match="at least 1 character") as caught:
        sources.load(model, {**REQUIRED[model], "host": ""})
    assert caught.value.field == "host"


@pytest.mark.parametrize("model", REQUIRED, ids=lambda model: model.__name__)
def test_an_empty_variable_that_is_refused_is_named(
    model: type[Frozen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts write it where what they insert is missing: the setting was named, or nothing at all."""
    refused = set()
    for one in settings(model):
        with monkeypatch.context() as patched:
            patched.setenv(variable := "BATON_" + "__".join(one.path).upper(), "")
            said = ""
            try:
                sources.load(model, REQUIRED[model])
            except ConfigError as error:
                said = error.message
                refused.add(one.path[-1])
            assert not said or variable in said, said
    assert "redis_password_file" in refused
    assert refused.isdisjoint({"redis_url", "model"}), (
        "a text may be empty, and a flag goes before a variable"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("BATON_MODEL", "BATON_MODEL is empty: unset it, or name a file or directory"),
        ("BATON_SECRET_FILE", "BATON_SECRET_FILE is empty: unset it"),
        ("BATON_HTTP_PORT", r"http_port: .* \(BATON_HTTP_PORT is empty: unset it, or give it a value\)"),
        ("baton_http_port", r"\(baton_http_port is empty"),
        ("BATON_HOST", r"host: .* \(BATON_HOST is empty"),
        ("BATON_CORS_ORIGINS", "BATON_CORS_ORIGINS must be JSON"),
    ],
)
def test_what_an_empty_variable_of_a_router_says(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match=said):
        sources.load(RouterConfig, {} if name == "BATON_MODEL" else {"model": tmp_path})
    if name == "BATON_HOST":  # not by a file that says the same
        monkeypatch.delenv(name)
        (tmp_path / "router.yaml").write_text("host: ''")
        with pytest.raises(ConfigError) as caught:
            sources.load(RouterConfig, {"model": tmp_path}, tmp_path / "router.yaml")
        assert "BATON_" not in caught.value.message


def test_a_model_whose_name_is_no_text_is_refused() -> None:
    """As of a directory whose name is not UTF-8; no answer could show it."""
    with pytest.raises(ValueError, match="give served_model_name"):
        RouterConfig(model=Path("/m\udcff"))
    assert RouterConfig(model=Path("/m\udcff"), served_model_name="m").served_name == "m"
