"""Which worker reports log probabilities of a prompt: the one that computes it, once for all choices.

A prefill worker leaves the wish out where it reserves at a decode worker, a router in attempts after the client's prompt
is complete.
"""

from __future__ import annotations

from cluster.protocol.pooling import Pooling
from wire import common_pb2


def computes_each_position(spec: common_pb2.GenerateSpec) -> bool:
    """Whether the worker that computes the prompt uses no cached prefix of it (`Sequence.needs_each_position`)."""
    sampling = spec.sampling
    return sampling.prompt_logprobs or Pooling(sampling.pooling).needs_each_position


def leave_out_prompt_logprobs(spec: common_pb2.GenerateSpec) -> None:
    """Change `spec`: its worker reports none."""
    spec.sampling.ClearField("prompt_logprobs")
    spec.sampling.ClearField("prompt_top_logprobs")
