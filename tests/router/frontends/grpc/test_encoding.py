"""Chunks are encoded as protobuf encodes them, with every token in its place."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

from hypothesis import example, given
from hypothesis import strategies as st

from router.frontends.grpc.encoding import encode_chunks
from router.link.token import PlainToken, Token
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from router.request.completion import Delta, FinishReason
from wire import common_pb2
from wire import inference_pb2 as pb

EDGES = st.sampled_from([0, 1, 127, 128, (1 << 14) - 1, 1 << 14, (1 << 21) - 1, 1 << 21, (1 << 32) - 1])
CHOICES = st.one_of(st.integers(0, 2), st.integers(0, 1000))
IDS = st.one_of(EDGES, st.integers(0, (1 << 32) - 1))
POSITIONS = st.one_of(EDGES, st.integers(0, (1 << 64) - 1))
PLAIN = st.builds(PlainToken, CHOICES, POSITIONS, IDS)
WHOLE = st.builds(
    lambda choice, position, token_id, logprob, top, finish: common_pb2.Token(
        choice=choice,
        position=position,
        token_id=token_id,
        logprob=logprob,
        top_logprobs=[common_pb2.TokenLogprob(token_id=one, logprob=-1.0) for one in top],
        finish=finish,
    ),
    CHOICES,
    POSITIONS,
    IDS,
    st.floats(-10, 0, width=32),
    st.lists(IDS, max_size=3),
    st.sampled_from([0, 1, 2]),
)
TEXTS = st.text(max_size=20)
PARTS = st.one_of(
    st.builds(ReasoningText, TEXTS),
    st.builds(ContentText, TEXTS),
    st.builds(CallBegin, CHOICES, TEXTS, TEXTS),
    st.builds(CallArguments, CHOICES, TEXTS),
)
FINISHES = st.sampled_from([None, None, "stop", "length"])
DELTAS = st.builds(
    Delta,
    CHOICES,
    st.text(max_size=200),
    st.lists(PLAIN | WHOLE, max_size=3).map(tuple),
    FINISHES,
    st.none() | st.lists(PARTS, max_size=3).map(tuple),
    prompt=st.just(()),
)
SCORED = st.builds(
    lambda choice, tokens: Delta(choice, "", (), prompt=tuple(tokens)),
    st.integers(0, 1),
    st.lists(WHOLE, min_size=1, max_size=3),
)


def message_of(token: Token) -> common_pb2.Token:
    if isinstance(token, PlainToken):
        return common_pb2.Token(choice=token.choice, position=token.position, token_id=token.token_id)
    return token


def part_of(part: Part) -> pb.Part:
    fields = part._asdict()
    if isinstance(part, CallBegin):
        return pb.Part(call=pb.CallBegin(**fields))
    if isinstance(part, CallArguments):
        return pb.Part(arguments=pb.CallArguments(**fields))
    return pb.Part(reasoning=part.text) if isinstance(part, ReasoningText) else pb.Part(content=part.text)


def by_protobuf(deltas: list[Delta]) -> list[pb.GenerateResponse]:
    made = []
    deltas = [delta for delta in deltas if not (delta.prompt and delta.choice)]
    for choice, several in groupby(deltas, attrgetter("choice")):
        run = list(several)
        finish: FinishReason | None = run[-1].finish
        chunk = pb.Chunk(
            choice=choice,
            text="".join(delta.text for delta in run),
            tokens=[message_of(token) for delta in run for token in delta.tokens],
            finish_reason=finish or "",
            parts=[part_of(part) for delta in run for part in delta.parts or ()],
            prompt_tokens=[message_of(token) for delta in run for token in delta.prompt],
        )
        made.append(pb.GenerateResponse(chunk=chunk))
    return made


@given(st.lists(DELTAS | SCORED, min_size=1, max_size=6))
@example([Delta(1, "", (), prompt=(PlainToken(2, 1, 3),))])
@example([Delta(0, "", ())])
@example([Delta(0, "a", (PlainToken(0, 7, 300),)), Delta(0, "é", (PlainToken(0, 8, 0),), "stop")])
def test_the_bytes_are_those_of_protobuf(deltas: list[Delta]) -> None:
    expected = [message.SerializeToString() for message in by_protobuf(deltas)]
    assert encode_chunks(deltas) == expected
