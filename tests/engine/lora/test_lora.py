"""Answers with adapters are those of checkpoints into which the adapters were merged, on every path of the engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.worker import EngineConfig
from cluster.errors import AdapterMissingError, AdapterSlotsError
from engine import kv_cache
from engine.build import load_model
from engine.engine import Engine
from engine.lora.adapter_files import Share, read_adapter, read_bytes
from engine.lora.loaded import LoadedAdapters
from engine.lora.slots import slot_bytes
from engine.model.config import ModelConfig
from engine.plan import PlanItem, StepPlan
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from engine.scheduler.decision import _slot
from engine.speculation.per_sequence import PerSequence
from engine.step_delta import StepDelta
from tests.engine.rank_parts import move
from tests.engine.ranks import KV_BYTES, engine_of, make_engine, run, runners
from tests.engine.rounded_checkpoints import HOW, reference_of
from tests.harness.adapters import ALL, ATTENTION, make_adapter, merge
from tests.harness.checkpoints import EXPERTS, prompt_ids, reference_greedy, variants
from tests.harness.exactness import assert_greedy

NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
PROMPT = prompt_ids(40)
PEFT = Path(__file__).parents[1] / "golden" / "peft"


class Adapted:
    """A model, three adapters of it, and the checkpoints into which they are merged."""

    def __init__(self, model, directory):
        self.model = model
        how: list[dict[str, Any]] = [
            {"rank": 4},
            {"rank": 8, "targets": ("q_proj", "down_proj", "o_proj"), "layers": (1,)},
            {"rank": 16, "use_rslora": True, "lora_alpha": 5},
        ]
        self.scalings = [None, None, 5 / 4]
        self.adapters = [make_adapter(directory / f"a{i}", model, seed=i, **one) for i, one in enumerate(how)]
        self.merged = [
            merge(model, one, directory / f"m{i}", self.scalings[i]) for i, one in enumerate(self.adapters)
        ]
        self.references = [*self.merged, model]
        self.digests = []

    def load(self, engine: Engine) -> Engine:
        self.digests = [engine.adapters.load(one) for one in self.adapters] + [""]
        return engine

    def request(self, which: int, prompt=None, name="", **more) -> EngineRequest:
        """`which`: 3 for the base model."""
        salt = bytes([which + 1]) * 16
        return EngineRequest(
            name or f"r{which}", prompt or PROMPT, GREEDY, adapter=self.digests[which], salt=salt, **more
        )

    def check(self, outputs, which: int, prompt=None, name="", already=0) -> None:
        tokens = outputs.tokens[name or f"r{which}", 0]
        assert len(tokens) == NEW - already
        assert_greedy("adapters", self.references[which], prompt or PROMPT, tokens, already)


class Foretold:
    """Proposes by turns how two streams go on: wrong for one that is computed with the other's weights."""

    def __init__(self, *streams: list[int]):
        self._streams, self._turn = streams, 0

    def propose(self, tokens: list[int], count: int) -> list[int]:
        self._turn += 1
        return self._streams[self._turn % 2][len(tokens) :][:count]


@pytest.fixture(scope="module")
def adapted(checkpoint, tmp_path_factory) -> Adapted:
    return Adapted(checkpoint("llama"), tmp_path_factory.mktemp("adapters"))


def test_three_adapters_and_the_base_in_one_batch_whole_and_chunked(adapted):
    """The adapters differ in rank, modules and layers; every answer is another one."""
    engine = adapted.load(make_engine(adapted.model, max_loras=3, max_batch_tokens=24))
    outputs = run(engine, *(adapted.request(i) for i in (2, 3, 0, 1)))
    for which in range(4):
        adapted.check(outputs, which)
    assert len({tuple(tokens) for tokens in outputs.tokens.values()}) == 4


def test_rows_without_adapter_pay_nothing_beside_none(adapted):
    engine = adapted.load(make_engine(adapted.model, max_loras=3))
    run(engine, adapted.request(3))
    assert engine._runner.adapted_rows == 0
    run(engine, adapted.request(3, name="base"), adapted.request(0))
    assert engine._runner.adapted_rows == len(PROMPT) + NEW - 1


@pytest.mark.long
def test_decode_steps_are_lists_of_jobs(adapted, monkeypatch):
    """With adapters or without; without, to the last bit as without slots for adapters."""

    def made(**more: Any) -> Engine:
        config = EngineConfig(model=adapted.model, dtype="bfloat16", kv_memory_bytes=KV_BYTES, **more)
        return engine_of(ModelRunner(load_model(config)))

    engine, lists = adapted.load(made(max_loras=3)), []
    jobs = engine._runner._decode_jobs
    compute = jobs.run

    def counted(with_adapters: bool) -> torch.Tensor:
        lists.append(with_adapters)
        return compute(with_adapters)

    monkeypatch.setattr(jobs, "run", counted)
    base = run(engine, adapted.request(3))
    assert lists == [False] * (NEW - 1)
    assert base.tokens == run(made(), adapted.request(3)).tokens
    mixed = run(engine, adapted.request(3), adapted.request(0))
    assert lists[NEW - 1 :] == [True] * (NEW - 1)
    assert mixed.tokens["r0", 0] != mixed.tokens["r3", 0]


def test_steps_with_adapters_are_not_recorded(adapted):
    runner = ModelRunner(load_model(EngineConfig(model=adapted.model, kv_memory_bytes=KV_BYTES, max_loras=1)))
    LoadedAdapters(runner.adapters).load(adapted.adapters[0])
    recorded: list[StepDelta] = []

    class Graphs:
        takes = staticmethod(lambda delta: True)
        run = staticmethod(lambda delta, drawn: recorded.append(delta))

    runner._graphs = Graphs()  # type: ignore[assignment]
    item = PlanItem("r", [7], 0, [0], 0, 1)
    with_adapter = msgspec.structs.replace(item, adapter=1)
    assert runner.execute(StepPlan([with_adapter], [])).shape[0] == 1
    assert not recorded
    runner.execute(StepPlan([item], []))
    assert len(recorded) == 1
    runner._graphs = None
    plain, changed = (runner.execute(StepPlan([one], [])).clone() for one in (item, with_adapter))
    assert not torch.equal(plain, changed)


def test_a_cached_prefix_is_met_by_its_own_adapter_only(adapted):
    engine = adapted.load(make_engine(adapted.model, max_loras=3))
    first = run(engine, *(adapted.request(i) for i in range(4)))
    assert set(first.cached.values()) == {0}
    again = run(engine, *(adapted.request(i) for i in range(4)))
    assert set(again.cached.values()) == {32}
    assert again.tokens == first.tokens


@pytest.mark.long
def test_preempted_and_resumed_requests_keep_their_adapter(adapted):
    engine = adapted.load(make_engine(adapted.model, max_loras=3, blocks=9, prefix_caching=False))
    outputs = run(engine, *(adapted.request(i) for i in range(4)))
    assert engine.stats().preemptions
    for which in range(4):
        adapted.check(outputs, which)
    given = reference_greedy(adapted.merged[0], PROMPT, 5)
    resumed = run(engine, adapted.request(0, name="resumed", output_tokens=given))
    adapted.check(resumed, 0, name="resumed", already=5)


@pytest.mark.long
def test_drafts_are_verified_with_the_adapter(adapted):
    engine = adapted.load(make_engine(adapted.model, max_loras=3, speculation="ngram"))
    expected = {
        which: [*PROMPT, *reference_greedy(adapted.references[which], PROMPT, NEW)] for which in (0, 3)
    }
    engine._drafter.method = PerSequence(lambda: Foretold(expected[0], expected[3]))
    outputs = run(engine, adapted.request(0))
    outputs.tokens |= run(engine, adapted.request(3)).tokens
    stats = engine.stats()
    assert 0 < stats.draft_tokens_accepted < stats.draft_tokens
    adapted.check(outputs, 0)
    adapted.check(outputs, 3)


@pytest.mark.long
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_kv_is_handed_over_between_degrees(prefill_tp, decode_tp, adapted):
    with (
        runners(adapted.model, prefill_tp, max_loras=3) as sources,
        runners(adapted.model, decode_tp, max_loras=3) as targets,
    ):
        prefill, decode = adapted.load(engine_of(sources[0])), adapted.load(engine_of(targets[0]))
        prefill.add(adapted.request(0, prefill_only=True))
        while not (first := prefill.step().tokens):
            pass
        reservation = decode.reserve(adapted.request(0), [], NEW)
        move(sources, prefill.block_ids("r0"), targets, reservation.block_ids, len(PROMPT))
        prefill.abort("r0")
        decode.commit("r0", first)
        outputs = run(decode)
    outputs.tokens["r0", 0][:0] = [first[0].token_id]
    adapted.check(outputs, 0)


def test_a_missing_adapter_is_refused_and_slots_are_reused(adapted, tmp_path):
    engine = make_engine(adapted.model, max_loras=1)
    directories = adapted.adapters
    first = engine.adapters.load(directories[0])
    assert engine.adapters.load(directories[0]) == first
    with pytest.raises(AdapterSlotsError, match="unload one"):
        engine.adapters.load(directories[1])
    runner: Any = engine._runner
    other = runner.adapters.read(directories[1]).digest
    with pytest.raises(AdapterMissingError):
        engine.add(EngineRequest("r", PROMPT, GREEDY, adapter=other))
    with pytest.raises(AdapterMissingError):
        engine.reserve(EngineRequest("r", PROMPT, GREEDY, adapter=other), [], 8)
    engine.add(EngineRequest("r", PROMPT, GREEDY, adapter=first))
    engine.adapters.release(first)
    assert not engine.adapter_fits(other, ())
    engine.add(EngineRequest("q", PROMPT, GREEDY, adapter=first))  # it began before, at another worker
    run(engine)
    assert not engine.adapter_fits(other, {first})
    assert engine.adapter_fits(other, ())
    engine.adapters.load(directories[1])
    with pytest.raises(AdapterMissingError):
        engine.add(EngineRequest("r", PROMPT, GREEDY, adapter=first))
    adapted.digests = ["", other]
    adapted.check(run(engine, adapted.request(1)), 1)


def test_a_slot_is_never_taken_from_a_request(adapted):
    """In each state in which the engine has one: waiting, running, reserved, parked, launched ahead and then aborted."""
    engine = make_engine(adapted.model, max_loras=1, max_batch_requests=1, overlap="on")
    digest = engine.adapters.load(adapted.adapters[0])
    engine.adapters.release(digest)

    def held() -> bool:
        return not engine.adapter_fits("other", ())

    def request(name: str) -> EngineRequest:
        return EngineRequest(name, PROMPT, GREEDY, adapter=digest)

    assert not held()
    engine.add(request("running"))
    engine.add(request("waiting"))
    assert held()
    engine.step()
    engine.abort("waiting")
    assert held()
    engine.park("running")
    assert held()
    engine.abort("running")
    assert not held()
    engine.reserve(request("reserved"), [], NEW)
    assert held()
    engine.abort("reserved")
    assert not held()


def test_an_adapter_without_a_slot_is_never_the_base_model():
    sequence: Any = SimpleNamespace(request=SimpleNamespace(adapter="gone"))
    with pytest.raises(KeyError):
        _slot(sequence, {})
    assert _slot(sequence, {"gone": 2}) == 2


def test_slots_are_in_the_memory_rule(adapted):
    config = EngineConfig(model=adapted.model, dtype="float32", kv_memory_bytes=KV_BYTES, max_loras=2)
    loaded = load_model(config)
    assert loaded.adapters is not None
    buffers = [one for _, one in loaded.adapters._adapted]
    taken = sum(one._a.nbytes + one._b.nbytes for one in buffers)
    model = ModelConfig.read(adapted.model)
    assert slot_bytes(model, loaded.config, 4) == taken


def test_reading_an_adapter_is_in_the_memory_rule(adapted, monkeypatch):
    """What a rank keeps of it, and one tensor of its file; never the whole file beside."""
    told: list[kv_cache.Needs] = []
    sized = kv_cache.sized

    def noted(config, size, memory, group, needs):
        told.append(needs)
        return sized(config, size, memory, group, needs)

    monkeypatch.setattr(kv_cache, "sized", noted)
    for more in ({"max_loras": 1, "max_lora_rank": 4}, {}):
        load_model(EngineConfig(model=adapted.model, dtype="float32", kv_memory_bytes=KV_BYTES, **more))
    model = ModelConfig.read(adapted.model)
    config = EngineConfig(model=adapted.model, max_loras=1, max_lora_rank=4)
    assert [needs.adapter for needs in told] == [read_bytes(model, config, 4), 0]
    read = read_adapter(adapted.adapters[0], Share(model, 4))
    kept = sum(one.a.nbytes + one.b.nbytes for one in read.modules.values())
    assert kept <= slot_bytes(model, config, 4) <= read_bytes(model, config, 4)


def test_int8_weights_take_adapters(adapted):
    """The products of the base model are int8's; what the adapter adds is the same."""
    engine = adapted.load(make_engine(adapted.model, max_loras=3, quantization="int8"))
    layer = engine._runner._decoder.layers[0].output
    x = torch.randn(3, layer._a.shape[-1])
    layer._step.groups = [(1, slice(1, 3))]
    added = layer(x) - layer.base(x)
    layer._step.groups = ()
    low = engine._runner.adapters.read(adapted.adapters[0]).modules["layers.0.self_attn.o_proj"]
    assert not added[0].any()
    torch.testing.assert_close(added[1:], x[1:] @ low.a.T @ low.b.T, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", HOW)
def test_weights_in_four_bits_and_fp8_take_adapters(adapted, how, tmp_path):
    """The tokens are those of the rounded numbers with the adapter added, rounded no further."""
    model = reference_of(adapted.model, how, tmp_path / "rounded")
    engine = adapted.load(make_engine(adapted.model, max_loras=3, quantization=how))
    outputs = run(engine, *(adapted.request(i) for i in range(4)))
    assert_greedy("adapters", model, PROMPT, outputs.tokens["r3", 0])
    for i, adapter in enumerate(adapted.adapters):
        merged = merge(model, adapter, tmp_path / f"m{i}", adapted.scalings[i])
        assert_greedy("adapters", merged, PROMPT, outputs.tokens[f"r{i}", 0])
    plain = [reference_greedy(one, PROMPT, NEW) for one in adapted.references]
    assert [outputs.tokens[f"r{i}", 0] for i in range(4)] != plain, "rounding shows in these tokens"


@pytest.mark.parametrize("variant", variants((), ("llama",)))
def test_every_family_answers_as_its_merged_checkpoint(variant, checkpoint, tmp_path):
    model = checkpoint(variant)
    fused = ("qkv_proj", "gate_up_proj")
    adapter = make_adapter(tmp_path / "a", model, targets=ATTENTION if variant in EXPERTS else (*ALL, *fused))
    merged = merge(model, adapter, tmp_path / "m")
    engine = make_engine(model, max_loras=1)
    digest = engine.adapters.load(adapter)
    outputs = run(engine, EngineRequest("r", PROMPT, GREEDY, adapter=digest))
    assert_greedy("adapters", merged, PROMPT, outputs.tokens["r", 0])


@pytest.mark.parametrize("name", ["plain", "stable"])
def test_an_adapter_of_peft_adds_what_peft_adds(name, checkpoint, tmp_path):
    """Ranks and scalings by patterns, rank-stabilised or not; written by tests/engine/golden/make_peft.py."""
    model, adapter, merged = checkpoint("llama"), PEFT / name, tmp_path / "merged"
    shutil.copytree(model, merged)
    weights = load_file(merged / "model.safetensors")
    for module, added in load_file(adapter / "added.st").items():
        weights[module] = (weights[module].double() + added.double()).to(weights[module].dtype)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    engine = make_engine(model, max_loras=1)
    digest = engine.adapters.load(adapter)
    tokens = run(engine, EngineRequest("r", PROMPT, GREEDY, adapter=digest)).tokens["r", 0]
    assert_greedy("adapters", merged, PROMPT, tokens)
    assert tokens != reference_greedy(model, PROMPT, NEW), "without it the answer is another one"
