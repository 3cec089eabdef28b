"""A rank in this process: its share of the model, and its endpoint for hand-offs."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import torch

from cluster.addresses import advertised
from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import ConfigError
from cluster.faults.orders import open_faults
from cluster.process.memory import room_bytes
from cluster.protocol import kv_format
from engine import build, kv_conversion
from engine.device_memory import DeviceMemory, HostMemory
from engine.parallel.group import LOAD_SECONDS, DistributedGroup, NullGroup, TpGroup
from engine.runner import LoadedModel, ModelRunner
from engine.speculation import load_draft
from engine.warm_up import Tell, say
from kv_transfer.decode_side.part_landing import check_slot_bytes
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.device.registry import device_bytes, pinned_bytes
from kv_transfer.layout.conversion import Conversion
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.ranks import Rank
from kv_transfer.transports.registry import open_endpoints


def check(config: WorkerConfig) -> None:
    """Check config.json and the settings before any weight is read. Raises ModelError or ConfigError."""
    own = own_engine(config)
    model, engine = build.check(own)
    if own.draft_model is not None:
        load_draft.settings(own)
    if config.role == "prefill":
        # Refuse the settings that decode workers refuse
        build.check_kv_dtype(
            engine.model_copy(update={"kv_dtype": _side(config, of_decode=True)}), engine.dtype
        )
    else:
        sent = engine.model_copy(update={"kv_dtype": _side(config, of_decode=False)})
        if sent.kv_dtype != engine.kv_dtype:
            build.check_kv_dtype(sent, engine.dtype)  # as prefill workers do
        check_slot_bytes(config.transfer.slot_bytes, build.block_bytes(model, sent) // model.num_layers)


def own_engine(config: WorkerConfig) -> EngineConfig:
    """The engine's settings, with the KV format of this worker's role."""
    own = _side(config, of_decode=config.role == "decode")
    return config.engine.model_copy(update={"kv_dtype": own})


def _side(config: WorkerConfig, *, of_decode: bool) -> str:
    return kv_format.side(config.engine.kv_dtype, of_decode=of_decode)


def _conversion(config: WorkerConfig, model: LoadedModel) -> Conversion | None:
    """The conversion of arriving parts; None if prefill and decode workers have the same format."""
    if not _converts(config):
        return None
    dtype = model.decoder.embedding.dtype
    write = kv_conversion.writer(model.kv_cache, dtype)
    return Conversion(dtype, model.model_config.head_dim, write)


def _converts(config: WorkerConfig) -> bool:
    return _side(config, of_decode=False) != _side(config, of_decode=True)


def _conversion_bytes(config: WorkerConfig, device: torch.device) -> int:
    """Upper bound of the device memory that converting a part takes while it runs."""
    if config.role == "prefill" or not _converts(config):
        return 0
    return kv_conversion.temporary_bytes(build.block_bytes(*build.check(own_engine(config))), device)


def load(
    config: WorkerConfig,
    rank: int,
    address: str,
    listener: socket.socket | None = None,
    tell: Tell = say,
) -> LoadedModel:
    """Load the rank's share of the model, on the leader the draft model first. `address` is the process group's. Raises
    ModelError, ConfigError, SetupError, and LostRankError if another rank is lost meanwhile, or keeps this one waiting too
    long."""
    device = build.rank_device(config.engine.device, rank)
    if device.type == "cuda":
        # The current card of this thread: else pinning or registering memory would open a context on the node's first.
        torch.cuda.set_device(device)
        check_pinned(config, HostMemory())
    handoff_bytes = device_bytes(config.role, config.transfer, on_cuda=device.type == "cuda")
    handoff_bytes += _conversion_bytes(config, device)
    own = own_engine(config)
    group = _group(config, rank, address, device, listener)
    drafts = rank == 0 and own.draft_model is not None
    draft = load_draft.load(own, tell) if drafts else None
    # On a CPU its pool is allocated, but in use only once it is written to.
    draft_bytes = draft.config.kv_memory_bytes if draft is not None and device.type == "cpu" else 0
    model = build.load_model(own, group, handoff_bytes=handoff_bytes, draft_bytes=draft_bytes, tell=tell)
    if isinstance(group, DistributedGroup):
        group.loaded()
    return model if draft is None else replace(model, draft=draft)


def check_pinned(config: WorkerConfig, host: DeviceMemory) -> None:
    """Raise ConfigError if main memory has no room for what the ranks on this host pin for hand-offs, with their KV on
    cards: CUDA's own error would name neither the memory nor the setting, and a container would be killed later."""
    here = config.engine.tensor_parallel // config.engine.nodes
    needed, free = here * pinned_bytes(config.role, config.transfer), min(one.free for one in host.limits())
    if needed > free:
        setting = "slot_bytes" if config.role == "decode" else "staging_bytes"
        raise ConfigError(
            f"{setting}: hand-offs of {here} ranks pin {needed} bytes of main memory, {free} are free: {needed - free} "
            f"more are needed (a container's memory limit), or less {setting}",
            field=setting,
        )


def divided(config: WorkerConfig, ranks: int, memory: DeviceMemory | None = None) -> WorkerConfig:
    """`config` with the share of the host's memory that each of its `ranks` on this host may take.

    It is measured once, before the first rank starts, for the reason in baton/local/memory.py. On cards, and where a size
    is given, `config` is returned as it is.
    """
    engine = config.engine
    if ranks == 1 or uses_cuda(engine) or engine.memory_bytes or engine.kv_memory_bytes:
        return config
    memory = memory or HostMemory()
    own = memory.own_bytes()  # counts as the share of the rank in this process
    room = room_bytes(memory.limits(), engine.memory_utilization) + own
    if room < ranks:  # loading fails in the first rank, whose error says how much is missing
        return config
    return config.model_copy(update={"engine": engine.model_copy(update={"memory_bytes": room // ranks})})


def sized(config: WorkerConfig) -> WorkerConfig:
    """Return `config` with the sizes of hand-offs for the device of this host (`TransferConfig.for_gpus`)."""
    if not uses_cuda(config.engine):
        return config
    return config.model_copy(update={"transfer": config.transfer.for_gpus()})


def uses_cuda(config: EngineConfig) -> bool:
    return build.device_name(config.device).startswith("cuda")


def _group(
    config: WorkerConfig, rank: int, address: str, device: torch.device, listener: socket.socket | None
) -> TpGroup:
    size = config.engine.tensor_parallel
    if size == 1:
        return NullGroup()
    # Ranks wait for the one that compiles longest: its attention kernels, all others, and the leader the draft model's.
    seconds = LOAD_SECONDS + 3 * config.engine.warm_up_seconds
    return DistributedGroup(rank, size, address, device, listener, load_seconds=seconds)


def open_rank(
    config: WorkerConfig, epoch: int, rank: int, model: LoadedModel
) -> tuple[ModelRunner, Rank[Any, Any], list[int]]:
    """Open the rank's runner, its end of hand-offs, and the addresses of its landing slots (decode).

    A sender is also its runner's export sink. Raises TransportError or ConfigError.
    """
    endpoints = open_endpoints(
        config.transfer,
        config.worker_id,
        epoch,
        rank,
        host=advertised(config.host, config.advertise_host, config.redis_url),
        listen_host=config.host,
        tls=config.tls_cert is not None,
    )
    faults = open_faults(config.fault_orders, config.worker_id)
    if config.role == "prefill":
        sender = SenderRank(
            rank=rank,
            kv_cache=model.kv_cache,
            kv_head_range=model.kv_head_range,
            endpoints=endpoints,
            config=config.transfer,
            faults=faults,
        )
        return ModelRunner(model, sender), sender, []
    receiver = ReceiverRank(
        rank=rank,
        kv_cache=model.kv_cache,
        kv_head_range=model.kv_head_range,
        endpoints=endpoints,
        config=config.transfer,
        decode_epoch=epoch,
        faults=faults,
        conversion=_conversion(config, model),
    )
    return ModelRunner(model), receiver, receiver.first_addresses
