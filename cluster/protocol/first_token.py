"""Which attempts end with their first token and need no decode worker.

Routers and prefill workers share the rule: otherwise one would wait for a decode worker that the other never called.
"""

from __future__ import annotations

from wire import common_pb2

TOKEN_BYTES = 4


def ends_with_first_token(spec: common_pb2.GenerateSpec) -> bool:
    """Whether the limits alone end the attempt at its first token. An end by a stop token is known only afterwards."""
    return spec.sampling.max_tokens - len(spec.output_tokens) // TOKEN_BYTES <= 1
