"""Messages on a pair's stream are checked by the decode worker against the peer's earlier ones."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import InvalidRequestError
from kv_transfer.decode_side.validate import MAX_OFFERED, check_message, check_together
from kv_transfer.outbox import MAX_TOGETHER
from wire import common_pb2, handoff_pb2

LAYOUT = common_pb2.KvLayout(tensor_parallel=2, num_kv_heads=8, page_size=16)
ID = bytes(16)


def message(**given: Any) -> handoff_pb2.PrefillToDecode:
    return handoff_pb2.PrefillToDecode(**given)


def hello(
    worker_id: str = "p", ranks: int = 1, heads: int = 8, model_id: str = "m", **more: Any
) -> handoff_pb2.PrefillToDecode:
    layout = common_pb2.KvLayout(tensor_parallel=ranks, num_kv_heads=heads, model_id=model_id)
    prefill = common_pb2.WorkerRef(worker_id=worker_id)
    return message(hello=handoff_pb2.Hello(digests="all", prefill=prefill, layout=layout, **more))


def test_valid_values_pass():
    for ranks in (1, 2, 4, 8, 16):
        check_message(hello(ranks=ranks), None)
    check_message(message(beat=common_pb2.Beat()), None)
    check_message(
        message(slot_request=handoff_pb2.SlotRequest(transfer_id=ID, source_rank=1, bytes=1)), LAYOUT
    )
    check_message(message(drained=handoff_pb2.Drained(transfer_id=ID)), LAYOUT)


@pytest.mark.parametrize(
    ("field", "said", "layout"),
    [
        ("hello", hello(), LAYOUT),
        ("hello", message(drained=handoff_pb2.Drained(transfer_id=ID)), None),
        ("prefill.worker_id", hello(worker_id=""), None),
        ("layout.tensor_parallel", hello(ranks=0), None),
        ("layout.tensor_parallel", hello(ranks=3), None),
        ("layout.tensor_parallel", hello(heads=0), None),
        ("layout.model_id", hello(model_id="x" * 2000), None),
        ("transports", hello(transports=["grpc"] * (MAX_OFFERED + 1)), None),
        ("digest_kinds", hello(digest_kinds=["x"] * (MAX_OFFERED + 1)), None),
        ("digest_kinds", hello(digest_kinds=["x" * 2000]), None),
        ("transfer_id", message(finish=handoff_pb2.Finish(transfer_id=b"short")), LAYOUT),
        ("transfer_id", message(reserve=handoff_pb2.Reserve()), LAYOUT),
        ("request_id", message(reserve=handoff_pb2.Reserve(transfer_id=ID, request_id="x" * 2000)), LAYOUT),
        (
            "source_rank",
            message(slot_request=handoff_pb2.SlotRequest(transfer_id=ID, source_rank=2, bytes=1)),
            LAYOUT,
        ),
        ("bytes", message(slot_request=handoff_pb2.SlotRequest(transfer_id=ID)), LAYOUT),
    ],
)
def test_a_mistake_is_named(field, said, layout):
    with pytest.raises(InvalidRequestError) as caught:
        check_message(said, layout)
    assert caught.value.field == field


def test_as_many_messages_travel_together_as_are_put_together():
    one = message(beat=common_pb2.Beat())
    check_together(message(more=[one] * MAX_TOGETHER))
    with pytest.raises(InvalidRequestError) as caught:
        check_together(message(more=[one] * (MAX_TOGETHER + 1)))
    assert caught.value.field == "more"
