"""Peers that follow the protocol but send false values: a prefill worker with false headers, parts and Finish, a decode
worker with false grants and answers. The other side ends that hand-off, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InternalError
from cluster.protocol.block_hash import pack_tokens
from tests.fuzz.conftest import few
from tests.fuzz.messages import changing
from tests.fuzz.tally import ANSWERED, REFUSED, Tally
from tests.fuzz.worker_messages import NUMBERS, message
from tests.fuzz.workers import Pair
from wire import common_pb2, decode_pb2, decode_pb2_grpc, handoff_pb2
from wire.handoff_pb2 import DecodeToPrefill as From
from wire.handoff_pb2 import PrefillToDecode as To

CANARY = list(range(100, 140))  # another request's prompt: its blocks are held while the peer lies
TYPED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
count = itertools.count()


@pytest.fixture(scope="module")
def decode(channels: dict[str, grpc.Channel]) -> grpc.Channel:
    return channels["Decode"]


@pytest.fixture(scope="module")
def prefill(channels: dict[str, grpc.Channel]) -> grpc.Channel:
    return channels["Prefill"]


def canary(pair: Pair, channels: dict[str, grpc.Channel]) -> list[int]:
    """Greedy tokens of a prompt whose first blocks the decode worker holds in its prefix cache."""
    asked = message(pair, "Decode/Run", secrets.token_bytes(16), CANARY)
    asked.spec.sampling.temperature = 0.0
    tokens, end = pair.answer(channels, "Decode/Run", asked)
    assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE, end
    return [token.token_id for token in tokens]


# --- a prefill worker that lies --------------------------------------------------------------------------


class LyingPrefill:
    """The stream of a lying prefill worker; `tell` waits a moment for the answer to a message.

    Used as a context manager, which reports the peer's exit: hypothesis may end an example by an exception, and without
    that report the peer's slots would rightly stay in quarantine.
    """

    def __init__(self, pair: Pair, decode: grpc.Channel):
        self.pair = pair
        self._decode = decode
        self.name = f"liar-{next(count)}"
        self.replies: queue.Queue[From | None] = queue.Queue()
        self.failure: grpc.RpcError | None = None
        self._said: queue.Queue[bytes | None] = queue.Queue()
        self._call = decode.stream_stream("/baton.v1.Decode/Handoff", None, None)(
            iter(self._said.get, None), timeout=60
        )
        self._reader = ThreadPoolExecutor(1)
        self._reading = self._reader.submit(self._read)

    def _read(self) -> None:
        try:
            for raw in self._call:
                reply = From.FromString(raw)
                for one in (reply, *reply.more):
                    self.replies.put(one)
        except grpc.RpcError as error:
            self.failure = error
        finally:
            self.replies.put(None)

    def tell(self, said: To, wanted: str = "") -> Any:
        """The next answer if it is of that kind; None if it is another, or if none comes for a while."""
        self._said.put(said.SerializeToString())
        while wanted:
            try:
                reply = self.replies.get(timeout=0.15)
            except queue.Empty:
                return None
            if reply is None:
                self.replies.put(None)
                return None
            if reply.WhichOneof("message") == wanted:
                return getattr(reply, wanted)
        return None

    def __enter__(self) -> LyingPrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.put(None)
        self._reading.result(60)
        self._reader.shutdown()
        gone = decode_pb2.PeerExitedRequest(worker_id=self.name).SerializeToString()
        self._decode.unary_unary("/baton.v1.Decode/PeerExited", None, None)(gone, timeout=60)


def greeting(pair: Pair, name: str) -> handoff_pb2.Hello:
    return handoff_pb2.Hello(
        prefill=common_pb2.WorkerRef(worker_id=name, epoch=7),
        decode_epoch=pair.decode.epoch,
        layout=pair.layout,
        transports=["grpc"],
        digests="all",
        digest_kinds=["xxh3_128", "sum64"],
    )


def honest_part(
    pair: Pair, transfer_id: bytes, grant: handoff_pb2.SlotGrant, tokens: range
) -> handoff_pb2.PartData:
    layout = pair.layout
    size = layout.num_layers * 2 * layout.num_kv_heads * len(tokens) * layout.head_dim * 4
    # Finite numbers: with NaN the request that decodes from them fails, rightly, and logs it.
    payload = np.random.default_rng().standard_normal(size // 4, dtype=np.float32).tobytes()
    header = handoff_pb2.PartHeader(
        transfer_id=transfer_id,
        prefill_epoch=7,
        decode_epoch=pair.decode.epoch,
        generation=grant.generation,
        slot=grant.slot,
        part=grant.part,
        layer_end=layout.num_layers,
        token_begin=tokens.start,
        token_end=tokens.stop,
        head_end=layout.num_kv_heads,
        bytes=size,
        digest_kind="xxh3_128",
        digest=xxhash.xxh3_128_digest(payload),
    )
    return handoff_pb2.PartData(header=header, payload=payload)


def lie(data: st.DataObject, header: handoff_pb2.PartHeader) -> None:
    """Other layers, heads or tokens of the same size, no digest, or any field set to any value."""
    tokens = header.token_end - header.token_begin

    def one_layer() -> None:
        header.token_end = header.token_begin + header.layer_end * tokens
        header.layer_end = 1

    def no_digest() -> None:
        header.ClearField("digest")
        header.ClearField("digest_kind")

    swaps: dict[str, Callable[[], None]] = {
        "layers": lambda: _shift(header, "layer", 1),
        "heads": lambda: _shift(header, "head", 1),
        # If the prompt's first blocks are held: into them. What is drawn must not depend on an answer.
        "tokens": lambda: _shift(header, "token", max(-header.token_begin, data.draw(st.integers(-48, 1)))),
        "one layer, more tokens": one_layer,
        "no digest": no_digest,
        "anything": lambda: data.draw(changing(header, 2)),
    }
    swaps[data.draw(st.sampled_from(sorted(swaps)))]()


def _shift(header: handoff_pb2.PartHeader, kind: str, by: int) -> None:
    for name in (f"{kind}_begin", f"{kind}_end"):
        setattr(header, name, getattr(header, name) + by)


@pytest.mark.long
@few(60, 0.15)
@given(data=st.data(), length=st.integers(1, 60))
def test_a_dishonest_prefill_worker_ends_its_own_hand_off_only(data, length, pair, channels, decode, tally):
    before = canary(pair, channels)
    transfer_id = secrets.token_bytes(16)
    with LyingPrefill(pair, decode) as peer:
        _converse(data, pair, peer, transfer_id, length)
    if peer.failure is not None:
        assert peer.failure.code() in TYPED, peer.failure
    tally.count("a prefill worker that lies", ANSWERED if peer.failure is None else REFUSED)
    cancel = decode_pb2.DecodeCancelRequest(transfer_id=transfer_id).SerializeToString()
    decode.unary_unary("/baton.v1.Decode/Cancel", None, None)(cancel, timeout=60)  # where it did commit
    assert canary(pair, channels) == before


def _converse(data: st.DataObject, pair: Pair, peer: LyingPrefill, transfer_id: bytes, length: int) -> None:
    # The first blocks of the canary's prompt are held: nothing may be written into them.
    prompt = (CANARY[: data.draw(st.sampled_from([0, 16, 32]))] + [5] * 60)[:length]
    hello = greeting(pair, peer.name)
    if data.draw(st.integers(0, 4)) == 0:
        data.draw(changing(hello.layout, 1))
    peer.tell(To(hello=hello), "welcome")
    sampling = common_pb2.SamplingParams(max_tokens=2, seed=1)
    spec = common_pb2.GenerateSpec(prompt_tokens=pack_tokens(prompt), sampling=sampling, n=1, salt=bytes(16))
    handle = common_pb2.HandleRef(incarnation=1, number=next(NUMBERS))
    reserve = handoff_pb2.Reserve(transfer_id=transfer_id, spec=spec, token_count=len(prompt), handle=handle)
    if data.draw(st.integers(0, 4)) == 0:
        data.draw(changing(reserve, 1))
    reply = peer.tell(To(reserve=reserve), "reserve_reply")
    held = reply.held_tokens if reply is not None else 0
    for part in range(data.draw(st.integers(0, 3))):
        _send_a_part(data, pair, peer, transfer_id, part, range(held, max(held + 1, len(prompt))))
    first = common_pb2.Token(position=len(prompt), token_id=5)
    flows = [handoff_pb2.FlowParts(parts=data.draw(st.sampled_from([0, 1, 2, 3, 2**32 - 1])))]
    finish = handoff_pb2.Finish(transfer_id=transfer_id, first_tokens=[first], flows=flows)
    if data.draw(st.booleans()):
        data.draw(changing(finish, 2))
    peer.tell(To(finish=finish))
    peer.tell(To(abort=handoff_pb2.AbortHandoff(transfer_id=transfer_id, reason="enough")))
    peer.tell(To(drained=handoff_pb2.Drained(transfer_id=transfer_id)))


def _send_a_part(
    data: st.DataObject, pair: Pair, peer: LyingPrefill, transfer_id: bytes, part: int, tokens: range
) -> None:
    size = honest_part(pair, transfer_id, handoff_pb2.SlotGrant(), tokens).header.bytes
    request = handoff_pb2.SlotRequest(transfer_id=transfer_id, part=part, bytes=size)
    if data.draw(st.integers(0, 4)) == 0:
        data.draw(changing(request, 1))
    grant = peer.tell(To(slot_request=request), "slot_grant")
    sent = honest_part(pair, transfer_id, grant or handoff_pb2.SlotGrant(), tokens)
    if data.draw(st.booleans()):
        lie(data, sent.header)
    peer.tell(To(part=sent), "part_result")


# --- a decode worker that lies ---------------------------------------------------------------------------


class LyingDecode(decode_pb2_grpc.DecodeServicer):
    """Answers every message like a correct worker; `change` alters the answers."""

    def __init__(self, layout: common_pb2.KvLayout, change: Any):
        self._layout = layout
        self._change = change

    def Handoff(self, requests: Iterator[To], context: Any) -> Iterator[From]:
        with contextlib.suppress(grpc.RpcError):
            for request in requests:
                for one in (request, *request.more):
                    yield from self._answers(one)

    def _answers(self, request: To) -> Iterator[From]:
        for answer in self._honest(request):
            yield from self._change(answer)

    def _honest(self, request: To) -> Iterator[From]:
        match request.WhichOneof("message"):
            case "hello":
                yield From(
                    welcome=handoff_pb2.Welcome(
                        decode_epoch=request.hello.decode_epoch,
                        layout=self._layout,
                        slot_bytes=1 << 16,
                        transport="grpc",
                        digests="all",
                        digest_kind="xxh3_128",
                        ranks=[handoff_pb2.RankEndpoint()],
                    )
                )
            case "reserve":
                yield From(reserve_reply=handoff_pb2.ReserveReply(transfer_id=request.reserve.transfer_id))
            case "slot_request":
                asked = request.slot_request
                grant = handoff_pb2.SlotGrant(
                    transfer_id=asked.transfer_id, part=asked.part, generation=1, deadline_seconds=1.0
                )
                yield From(slot_grant=grant)
            case "part":
                header = request.part.header
                yield From(
                    part_result=handoff_pb2.PartResult(
                        transfer_id=header.transfer_id, part=header.part, verified=True
                    )
                )
            case "finish":
                yield From(committed=handoff_pb2.Committed(transfer_id=request.finish.transfer_id))
            case "drained":
                yield From(drained_ack=handoff_pb2.DrainedAck(transfer_id=request.drained.transfer_id))


@few(60, 0.05)
@given(data=st.data())
def test_a_dishonest_decode_worker_ends_its_own_hand_off_only(data, pair, channels, tally):
    lies = data.draw(
        st.sets(st.sampled_from(["welcome", "reserve_reply", "slot_grant", "part_result"]), min_size=1)
    )
    # Drawn before the stream runs: answers are made on the server's threads.
    changed = {kind: data.draw(st.integers(1, 2**32)) for kind in lies}

    def change(answer: From) -> Iterator[From]:
        kind = answer.WhichOneof("message")
        if kind is not None and kind in changed:
            _twist(getattr(answer, kind), changed[kind])
        yield answer
        if kind in changed and changed[kind] % 3 == 0:
            yield answer  # twice

    server = grpc.server(ThreadPoolExecutor(4))
    servicer = LyingDecode(pair.layout, change)  # type: ignore[abstract]  # the test calls no other method
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        asked = message(pair, "Prefill/Run", secrets.token_bytes(16), [3] * data.draw(st.integers(1, 50)))
        asked.admission_deadline_ms = 1000
        worker = f"liar-{next(count)}"
        asked.decode.CopyFrom(common_pb2.WorkerRef(worker_id=worker, epoch=9, address=f"127.0.0.1:{port}"))
        _, end = pair.answer(channels, "Prefill/Run", asked)
        assert end.error.code != InternalError.__name__, end
        done = end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE
        tally.count("a decode worker that lies", ANSWERED if done else REFUSED)
    finally:
        server.stop(None).wait()


EDGES = (0, 1, 2, 7, 2**31, 2**32 - 1)


def _twist(answer: Any, number: int) -> None:
    """Set one numeric field to an edge value of its type, both selected by `number`."""
    fields = [f for f in answer.DESCRIPTOR.fields if f.cpp_type in (f.CPPTYPE_UINT32, f.CPPTYPE_UINT64)]
    if "welcome" in answer.DESCRIPTOR.name.lower():
        answer = answer.layout if number % 2 else answer
        fields = [f for f in answer.DESCRIPTOR.fields if f.cpp_type in (f.CPPTYPE_UINT32, f.CPPTYPE_UINT64)]
    field = fields[number % len(fields)]
    setattr(answer, field.name, EDGES[number // 7 % len(EDGES)])


def test_both_workers_still_serve(pair, channels, tally: Tally):
    asked = message(pair, "Prefill/Run", secrets.token_bytes(16), [9] * 30)
    _, end = pair.answer(channels, "Prefill/Run", asked, 30.0)
    assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE, end
    pair.check_well()
