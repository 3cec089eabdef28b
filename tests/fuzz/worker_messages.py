"""Messages to workers."""

from __future__ import annotations

import itertools
from typing import Any

from cluster.protocol.block_hash import pack_tokens
from cluster.protocol.wire_version import WIRE_VERSION
from tests.fuzz.workers import Pair
from wire import common_pb2, decode_pb2, prefill_pb2

METHODS = {
    "Prefill/Run": prefill_pb2.PrefillRunRequest,
    "Prefill/Cancel": prefill_pb2.PrefillCancelRequest,
    "Decode/Run": decode_pb2.DecodeRunRequest,
    "Decode/Abort": decode_pb2.AbortRequest,
    "Decode/Cancel": decode_pb2.DecodeCancelRequest,
    "Decode/PeerExited": decode_pb2.PeerExitedRequest,
}
NUMBERS = itertools.count(1)


def spec(pair: Pair, prompt: list[int]) -> common_pb2.GenerateSpec:
    return common_pb2.GenerateSpec(
        model_id=pair.decode._identity.model_id,
        prompt_tokens=pack_tokens(prompt),
        sampling=common_pb2.SamplingParams(max_tokens=3, temperature=1.0, seed=1),
        n=1,
        salt=bytes(16),
        weight=1.0,
    )


def message(pair: Pair, method: str, transfer_id: bytes, prompt: list[int]) -> Any:
    """One that is right."""
    made = METHODS[method](**{} if method == "Decode/PeerExited" else {"transfer_id": transfer_id})
    names = {field.name for field in made.DESCRIPTOR.fields}
    if "wire_version" in names:
        made.wire_version = WIRE_VERSION
    if "worker_epoch" in names:
        made.worker_epoch = (pair.prefill if method.startswith("Prefill") else pair.decode).epoch
    if "spec" in names:
        made.spec.CopyFrom(spec(pair, prompt))
    if "admission_deadline_ms" in names:
        made.admission_deadline_ms = 300
    if "decode" in names:
        made.decode.CopyFrom(pair.decode._identity.ref)
    for name in ("handle", "decode_handle"):  # of a router whose link never comes
        if name in names:
            getattr(made, name).CopyFrom(common_pb2.HandleRef(incarnation=1, number=next(NUMBERS)))
    return made
