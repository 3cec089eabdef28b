"""Settings of `baton up`: which processes get them, and which are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from baton.local import options as up_options
from baton.local.options import UpOptions
from cluster.config.worker import ROLES
from cluster.errors import ConfigError
from cluster.process.memory import limits


def test_up_counts_the_pools_of_all_ranks(checkpoint):
    model, free = checkpoint("llama"), min(limit.free for limit in limits())
    one_fits = free // 3
    engine = {"engine": {"kv_memory_bytes": one_fits, "device": "cpu"}}
    options = UpOptions(model, prefill=0, decode=1, worker=engine, router={"local_prefill": "fallback"})
    assert options.worker_config("decode", "", "", "").engine.kv_memory_bytes == one_fits
    with pytest.raises(ConfigError) as caught:
        UpOptions(model, prefill=2, decode=2, prefill_tp=2, worker=engine)
    assert caught.value.field == "kv_memory" and "each of 6 ranks" in caught.value.message


@pytest.mark.parametrize(
    ("flag", "section", "values"),
    [
        ("prefill", "", [-1]),
        ("kv_memory", "engine", [-1, -(1 << 30)]),
        ("max_model_len", "router", [-1]),
        ("page_size", "engine", [0, -16]),
        ("max_batch_tokens", "engine", [-1]),
        ("http_port", "router", [-1, 65536]),
        ("grpc_port", "router", [-1, 65536]),
        ("trace_sample_ratio", "router", [math.nan, -0.5, 2.0]),
        ("batch_aging_seconds", "worker", [math.nan, 0.0, -1.0]),
    ],
)
def test_a_flag_of_up_that_no_process_would_take_is_named(flag, section, values, checkpoint):
    setting = {"kv_memory": "kv_memory_bytes"}.get(flag, flag)
    for value in values:
        given = {
            "": {flag: value},
            "engine": {"worker": {"engine": {setting: value}}},
        }.get(section, {section: {flag: value}})
        with pytest.raises(ConfigError) as caught:
            UpOptions(checkpoint("llama"), **given)
        assert caught.value.field == flag
        assert caught.value.message.startswith("--" + flag.replace("_", "-"))


def test_speculation_is_passed_to_decode_workers_only(checkpoint):
    drafts = {"engine": {"speculation": "ngram", "speculative_tokens": 6}}
    for given in ({"worker": drafts}, {"sections": {"worker": drafts}}, {"sections": {"decode": drafts}}):
        options = UpOptions(checkpoint("llama"), **given)
        most = {role: options.worker_config(role).engine.most_drafts for role in ROLES}
        assert most == {"prefill": 0, "decode": 6}
    with pytest.raises(ConfigError, match="--speculation ngram has no effect on a prefill worker"):
        UpOptions(checkpoint("llama"), sections={"prefill": {"engine": {"speculation": "ngram"}}})
    with pytest.raises(ConfigError, match="--speculative-tokens 6 has no effect"):
        UpOptions(checkpoint("llama"), worker={"engine": {"speculative_tokens": 6}})


def test_an_engine_section_may_be_empty_and_no_number(checkpoint):
    model = checkpoint("llama")
    assert (
        UpOptions(model, sections={"decode": {"engine": None}}).worker_config("decode").engine.draft_model
        is None
    )
    shared = {"engine": {"threads": 3, "page_size": 8}}
    for given in ({"sections": {"worker": shared, "decode": {"engine": None}}},
                  {"sections": {"worker": {"engine": None}}, "worker": shared}):  # fmt: skip
        engine = UpOptions(model, **given).worker_config("decode").engine
        assert (engine.threads, engine.page_size) == (3, 8)
    others: list[Any] = [5, 0, [], False]
    for other in others:
        with pytest.raises(ConfigError, match="--config: engine of decode is not a section"):
            UpOptions(model, sections={"worker": shared, "decode": {"engine": other}})


def test_settings_of_a_role_are_merged_once(checkpoint, monkeypatch):
    calls = list[object]()

    def counted(given: Mapping[str, Any]) -> Mapping[str, Any]:
        calls.append(given)
        return given

    monkeypatch.setattr(up_options, "without_drafts", counted)
    options = UpOptions(checkpoint("llama"), worker={"engine": {"threads": 2}})
    assert all(options.worker_config(role).engine.threads == 2 for role in ROLES)
    assert len(calls) == 2, "sections and flags"


def test_a_draft_model_is_passed_to_decode_workers_only(checkpoint, tmp_path, monkeypatch):
    model = checkpoint("llama")
    monkeypatch.chdir(model.parent)
    drafts = {"engine": {"draft_model": model.name, "draft_kv_memory_bytes": "1MiB"}}
    for given in ({"worker": drafts}, {"sections": {"worker": drafts}}, {"sections": {"decode": drafts}}):
        options = UpOptions(model, **given)
        engines = {role: options.worker_config(role).engine for role in ROLES}
        assert engines["prefill"].draft_model is None and not engines["prefill"].draft_kv_memory_bytes
        assert engines["decode"].draft_model == model.absolute(), "workers run in other directories"
    (tmp_path / "config.json").write_text(
        (model / "config.json").read_text().replace('"vocab_size": 512', '"vocab_size": 513')
    )
    for draft, message in (
        (tmp_path / "none", r"--draft-model .*none: no config.json there"),
        (tmp_path, r"--draft-model .* has a vocabulary of 513 tokens, more than the 512 of --model"),
    ):
        with pytest.raises(ConfigError, match=message):
            UpOptions(model, worker={"engine": {"draft_model": draft}})
    with pytest.raises(ConfigError, match=r"--draft-model .*/5: no config.json there"):
        UpOptions(model, sections={"decode": {"engine": {"draft_model": 5}}})
    with pytest.raises(ConfigError, match=r"--draft-model .* has no effect on a prefill worker"):
        UpOptions(model, sections={"prefill": {"engine": {"draft_model": str(model)}}})


def test_the_last_router_s_port_is_a_port_too(checkpoint):
    last = {"http_port": 65534}
    assert UpOptions(checkpoint("llama"), router=last, routers=2).routers == 2
    with pytest.raises(ConfigError) as caught:
        UpOptions(checkpoint("llama"), router=last, routers=3)
    assert caught.value.field == "http_port"
