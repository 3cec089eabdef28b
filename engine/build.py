"""Loads a model: resolves every "auto", loads this rank's share of the weights, allocates its cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from cluster.protocol.kv_format import INT8, PAGE_MULTIPLE
from cluster.protocol.kv_heads import head_range
from engine import kv_cache, largest_step, warm_up
from engine.attention import registry
from engine.attention.base import AttentionBackend, AttentionShape
from engine.device_memory import DeviceMemory, memory_of, trim_allocator
from engine.graphs import decode_graphs
from engine.kv_blocks import KvSpec
from engine.lora import slots
from engine.lora.adapter_files import read_bytes
from engine.lora.slots import AdapterSlots
from engine.make_linears import maker_of
from engine.model import preflight, rotary, shares
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.layer_weights import LayerWeights
from engine.model.weights import Checkpoint
from engine.ops.base import LayerOps, OpsShape
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.ops.torch_ops import TorchOps
from engine.parallel.group import NullGroup, TpGroup
from engine.quant import coded, formats, int8
from engine.runner import LoadedModel

CPU = torch.device("cpu")
Backends = tuple[LayerOps, AttentionBackend]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(asked: str, stored: str) -> str:
    """The dtype to compute in, for the setting `asked` and a checkpoint stored as `stored`."""
    if asked != "auto":
        return asked
    # fp16 is 15 times slower than bf16 on CPUs, and its KV could not be exchanged with a bf16 worker's.
    return "float32" if stored == "float32" else "bfloat16"


def device_name(asked: str) -> str:
    """The setting `device` without "auto"."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def rank_device(asked: str, rank: int) -> torch.device:
    """Device of a rank on its node, for the setting `device`. "cuda" gives rank n the node's card n; "cuda:N" names the
    card of a single rank. A rank alone on its node sees one card only.
    """
    device = torch.device(device_name(asked))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device


def check(config: EngineConfig) -> tuple[ModelConfig, EngineConfig]:
    """Resolve and check config.json and the settings, before any weight is read or any rank is started.

    Raises ModelError naming the key, or ConfigError naming the setting.
    """
    model = preflight.read_model(config)
    rotary.check_angles(model)
    resolved = resolve(config, model)
    if resolved.kv_memory_bytes:
        kv_cache.check_fits(resolved.kv_memory_bytes, block_bytes(model, resolved), resolved)
    return model, resolved


def block_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of one KV block on one rank."""
    first, end = head_range(0, config.tensor_parallel, model.num_kv_heads)
    return _kv_spec(model, config, end - first).block_bytes


def _kv_spec(model: ModelConfig, config: EngineConfig, kv_heads: int) -> KvSpec:
    dtype = torch.int8 if config.kv_dtype == INT8 else _DTYPES[config.dtype]
    return KvSpec.of(model.num_layers, kv_heads, config.page_size, model.head_dim, dtype)


def weight_bytes(model: ModelConfig, config: EngineConfig, *, untied_head: bool = False) -> int:
    """Bytes of one rank's share of the weights as they are computed with; biases are left out. `untied_head`:
    the stored output head differs from the embedding, although the configuration ties them."""
    sizes = shares.most_weights(model, config.tensor_parallel, expert_parallel=config.expert_parallel)
    width, hidden = _DTYPES[config.dtype].itemsize, model.hidden_size
    kept = (sizes.kept + sizes.vocabulary * hidden) * width
    head = 0 if model.tie_embeddings and not untied_head else sizes.vocabulary * hidden * width
    if not formats.is_int8(model.quantization, config.quantization):
        if (found := _code_bytes(model, config)) is not None:
            each, beside = found
            return kept + int(sizes.matrices * each) + sizes.outputs * beside + head
        return kept + sizes.matrices * width + head
    # The embedding, the norms and the routers stay as they are, so does the output head of most stored checkpoints; in
    # int8 it is a matrix of its own, tied or not.
    if config.quantization == "int8":
        head = sizes.vocabulary * (hidden + int8.OUTPUT_BYTES)
    return kept + sizes.matrices + sizes.outputs * int8.OUTPUT_BYTES + head


def _kept_codes(config: EngineConfig) -> coded.Kept | None:
    """The codes that are kept as they are stored, because kernels read them in bf16: on CUDA where Triton works, which
    attention by `triton` shows; on CPUs that have an instruction for bf16. `config` is resolved."""
    if config.quantization == "int8" or _DTYPES[config.dtype] is not torch.bfloat16:
        return None
    if config.attention_backend == "triton":
        return coded.ON_CUDA
    if config.attention_backend != "cpu":
        return None
    from engine.ops.cpu.products import nibbles

    return coded.ON_CPU if nibbles.supported() else None


def _code_bytes(model: ModelConfig, config: EngineConfig) -> tuple[float, int] | None:
    """As coded.code_bytes, for the matrices of a rank. None if any of them is expanded: then all count as expanded."""
    if (kept := _kept_codes(config)) is None:
        return None
    size = config.tensor_parallel
    own = (model.num_heads // size * model.head_dim, model.intermediate_size // size)
    whole, shared = ((model.hidden_size, *own), ()) if size == 1 else ((model.hidden_size,), own)
    return coded.code_bytes(_format(model, config), whole, shared, kept)


def _format(model: ModelConfig, config: EngineConfig) -> formats.StoredFormat | None:
    return formats.of_matrices(model.quantization, config.quantization)


def _weights_line(model: ModelConfig, config: EngineConfig, untied_head: bool) -> str:
    """A line for the log, before the weights are loaded: the bytes that they will take."""
    line = f"weights take {weight_bytes(model, config, untied_head=untied_head)} bytes on each rank"
    if (how := _format(model, config)) is None:
        return line
    line += f", rounded to {config.quantization}" if how.rounded else f", stored as {how.title}"
    if formats.is_int8(model.quantization, config.quantization):
        return line
    if _code_bytes(model, config) is not None:
        return f"{line}, and not expanded"
    if how.rounded:
        return f"{line}; no kernel here reads that, so it saves no memory: use auto, or int8 for less"
    if model.experts is not None:  # int8 is refused for them
        return f"{line}, expanded to {config.dtype} while loading"
    less = weight_bytes(model, config.model_copy(update={"quantization": "int8"}))
    return f"{line}, expanded to {config.dtype} while loading ({less} with quantization int8)"


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """A new configuration without "auto", except the KV pool's size, which depends on what the weights leave.

    `kv_dtype` auto stays: it is `dtype`. Raises ConfigError.
    """
    name = device_name(config.device)
    device = torch.device(name)
    preflight.check_settings(config, model)
    dtype = compute_dtype(config.dtype, model.dtype)
    check_kv_dtype(config, dtype)
    _check_card(device)
    return config.model_copy(
        update={
            "device": name,
            "dtype": dtype,
            "max_model_len": config.max_model_len or model.max_model_len,
            "attention_backend": _choose_backend(config, device, _DTYPES[dtype], model),
        }
    )


def _choose_backend(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, model: ModelConfig
) -> str:
    """On CUDA kernels are called to see whether they work here, which compiles them."""
    chosen: list[str] = []

    def choose() -> None:
        needs = registry.Features(model.attention_cap > 0, model.family.sinks, config.kv_dtype == INT8)
        chosen.append(
            registry.choose(config.attention_backend, device, dtype, model.head_dim, config.page_size, needs)
        )

    if device.type == "cuda":
        stage = warm_up.Stage(f"attention_backend {config.attention_backend}", choose)
        warm_up.run("attention kernels are tried", [stage], config.warm_up_seconds, warm_up.say, device)
    else:
        choose()
    return chosen[0]


def check_kv_dtype(config: EngineConfig, dtype: str) -> None:
    """Raise ConfigError if `config.kv_dtype` is not supported for a model that is computed in `dtype`."""
    reason = ""
    if ">" in config.kv_dtype:
        reason = "names the formats of two roles, an engine has one"
    elif config.kv_dtype == "bf16" and dtype != "bfloat16":
        reason = f"the model is computed in {dtype}: use auto, or dtype bfloat16"
    elif config.kv_dtype == INT8 and config.page_size % PAGE_MULTIPLE:
        reason = f"needs a page_size that {PAGE_MULTIPLE} divides, not {config.page_size}"
    if reason:
        raise ConfigError(f"kv_dtype {config.kv_dtype}: {reason}", field="kv_dtype")


def _check_card(device: torch.device) -> None:
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("device cuda: torch sees no CUDA device here; use cpu", field="device")
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device {device}: this machine has cuda:0 to cuda:{count - 1} (those in CUDA_VISIBLE_DEVICES)",
            field="device",
        )


def load_model(
    config: EngineConfig,
    group: TpGroup | None = None,
    *,
    handoff_bytes: int = 0,
    draft_bytes: int = 0,
    memory: DeviceMemory | None = None,
    tell: warm_up.Tell = warm_up.say,
) -> LoadedModel:
    """Load this rank's share of the model.

    `handoff_bytes`: device memory that the rank allocates later, beside its KV pool. `draft_bytes`: host memory of the
    draft model's pool, allocated but not yet in use. The pool comes last, because it is sized by what is in use and by
    what the largest step was measured to take. `tell` gets what is being done.

    Raises ModelError naming the tensor or key, ConfigError naming the setting, SetupError where compiling takes too long.
    """
    group = group or NullGroup()
    model, resolved = check(config)
    device, dtype = rank_device(resolved.device, group.rank), _DTYPES[resolved.dtype]
    if device.type == "cpu":
        torch.set_num_threads(resolved.threads)
    memory, size = memory or memory_of(device), block_bytes(model, resolved)
    weights = _bytes_to_load(model, resolved, tell)
    on_host = device.type == "cpu"  # elsewhere the pool takes none of the memory into which adapters are read
    adapter = read_bytes(model, resolved, dtype.itemsize) if on_host and resolved.adapter_slots else 0
    kv_cache.check_before_load(
        resolved, size, memory, kv_cache.Needs(weights, 0, handoff_bytes, size, draft_bytes, adapter)
    )
    team = _team_of(resolved, model, device)
    tell("weights are read")
    adapters = AdapterSlots(model, resolved, group, dtype, device, team) if resolved.adapter_slots else None
    decoder = _read_decoder(model, resolved, group, device, team, adapters)
    spec = _kv_spec(model, resolved, decoder.num_kv_heads)
    shape = _attention_shape(model, decoder, resolved)

    def backends(cache: Tensor) -> Backends:
        ops = _make_ops(model, decoder, cache, resolved, team)
        return ops, registry.make(resolved.attention_backend, shape, cache, team)

    one_block = torch.zeros((1, *spec.shape), dtype=spec.dtype, device=device)
    small = backends(one_block)  # in use until the pool has its size, as those of the pool are later
    step_bytes = recorded_bytes = 0
    if not resolved.kv_memory_bytes:
        _compile(resolved, decoder, small, tell)
        tell("the largest step is measured")
        step_bytes = largest_step.bytes_taken(resolved, decoder, group, *small, memory)
        step_bytes += decoder.unmeasured_bytes(resolved.step_tokens)
        step_bytes += slots.step_bytes(model, resolved, resolved.step_tokens, dtype.itemsize)
        recorded_bytes = _recorded_bytes(resolved, decoder, backends, one_block, memory)
    recorded_bytes += size  # the null block
    recorded_bytes += _listed_bytes(resolved, decoder, team, *small)
    del one_block
    needs = kv_cache.Needs(0, step_bytes, handoff_bytes, recorded_bytes, draft_bytes, adapter)
    resolved = kv_cache.sized(resolved, size, memory, group, needs)
    cache = kv_cache.allocate(resolved.kv_memory_bytes, spec.shape, spec.dtype, device)
    ops, attention = backends(cache)
    trim_allocator()
    return LoadedModel(resolved, model, decoder, ops, attention, cache[:-1], group, team, adapters)


def _bytes_to_load(model: ModelConfig, config: EngineConfig, tell: warm_up.Tell) -> int:
    """Bytes of this rank's weights and of the slots of adapters. `tell` gets those of the weights."""
    dtype = _DTYPES[config.dtype]
    with Checkpoint(config.model, dtype, CPU, quantization=_format(model, config)) as stored:
        untied_head = LayerWeights(model, stored, 0, 1).has_untied_head()
    tell(_weights_line(model, config, untied_head))
    weights = weight_bytes(model, config, untied_head=untied_head)
    return weights + slots.slot_bytes(model, config, dtype.itemsize)


def _team_of(config: EngineConfig, model: ModelConfig, device: torch.device) -> Team:
    if config.attention_backend == "cpu":
        return KernelTeam(config.threads, _DTYPES[config.dtype], model.head_dim)
    return Team(config.threads if device.type == "cpu" else 1)


def _read_decoder(
    model: ModelConfig,
    config: EngineConfig,
    group: TpGroup,
    device: torch.device,
    team: Team,
    adapters: AdapterSlots | None,
) -> Decoder:
    dtype, kept = _DTYPES[config.dtype], _kept_codes(config)
    kinds = kept.kinds if kept is not None else ()
    how = _format(model, config)
    with Checkpoint(config.model, dtype, device, quantization=how, kinds=kinds) as checkpoint:
        return Decoder(
            model,
            checkpoint,
            group,
            maker_of(config, model, team, group),
            expert_parallel=config.expert_parallel,
            **({"adapt": adapters.adapt} if adapters is not None else {}),
        )


def _attention_shape(model: ModelConfig, decoder: Decoder, config: EngineConfig) -> AttentionShape:
    return AttentionShape(
        decoder.num_heads,
        decoder.num_kv_heads,
        model.head_dim,
        config.page_size,
        model.windows,
        model.attention_scale,
        model.attention_cap,
        decoder.sinks,
        _DTYPES[config.dtype],
    )


def _recorded_bytes(
    config: EngineConfig,
    decoder: Decoder,
    backends: Callable[[Tensor], Backends],
    one_block: Tensor,
    memory: DeviceMemory,
) -> int:
    """Bytes of decode steps that are recorded."""
    capturable = decoder.capturable and registry.backend_class(config.attention_backend).capturable
    if not decode_graphs.recorded(one_block.device, config.cuda_graphs, capturable):
        return 0
    return largest_step.recorded_bytes(config, decoder, backends, one_block, memory)


def _compile(config: EngineConfig, decoder: Decoder, made: Backends, tell: warm_up.Tell) -> None:
    """Compile all kernels, so that this is no part of what the largest step is measured to take. Every rank of the group
    must call it. Where nothing is measured, the warm-up compiles."""
    stages = [
        warm_up.Stage(name, partial(largest_step.run, config, decoder, plan, *made))
        for name, plan in warm_up.first_steps(config, config.max_batch_tokens)
    ]
    device = decoder.embedding.device
    try:
        warm_up.run("kernels are compiled", stages, config.warm_up_seconds, tell, device)
    except torch.OutOfMemoryError as error:  # of small steps: the largest one would fit even less
        raise largest_step.does_not_fit(config, error) from None


def _listed_bytes(
    config: EngineConfig, decoder: Decoder, team: Team, ops: LayerOps, attention: AttentionBackend
) -> int:
    """Bytes of decode steps that are lists of jobs: their buffers grow in the first large batches and stay."""
    if not isinstance(team, KernelTeam):
        return 0
    from engine import decode_jobs

    return decode_jobs.most_bytes(decoder, ops, attention, team, config.max_batch_requests)


def _make_ops(
    model: ModelConfig, decoder: Decoder, cache: Tensor, config: EngineConfig, team: Team
) -> LayerOps:
    """Own kernels where attention is by those of the same kind: that they run here was found out; else torch's."""
    shape = OpsShape(
        decoder.num_heads,
        decoder.num_kv_heads,
        model.head_dim,
        model.norm_eps,
        model.activation,
        model.table_of_layer,
        model.swiglu_alpha,
        model.swiglu_limit,
        _DTYPES[config.dtype],
    )
    cos, sin = rotary.rotary_tables(model, config.max_model_len)
    if isinstance(team, KernelTeam):
        from engine.ops.cpu.ops import CpuOps

        return CpuOps(shape, cos, sin, cache, team)
    if config.attention_backend == "triton":
        from engine.ops.cuda.ops import TritonOps

        return TritonOps(shape, cos, sin, cache)
    return TorchOps(shape, cos, sin, cache)
