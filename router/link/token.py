"""Tokens as they arrive over a link."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from wire import common_pb2


class _Row(NamedTuple):
    choice: int
    position: int
    token_id: int


class PlainToken(_Row):
    """A token that is no more than its id: a row of a frame's columns. It has the fields of `common_pb2.Token`, which
    takes three times as long to make."""

    __slots__ = ()
    logprob = 0.0
    top_logprobs: tuple[common_pb2.TokenLogprob, ...] = ()
    rank = 0
    embedding = b""
    finish = common_pb2.FINISH_REASON_UNSPECIFIED


Token: TypeAlias = PlainToken | common_pb2.Token
