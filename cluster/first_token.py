"""Which attempts are over with their first token: routers and prefill workers must judge alike, or one waits for a decode
worker that the other has not asked."""

from __future__ import annotations

from wire import common_pb2

TOKEN_BYTES = 4


def ends_with_first_token(spec: common_pb2.GenerateSpec) -> bool:
    """Known before it is computed: nothing is handed over then. One that a stop token ends shows only afterwards."""
    return spec.sampling.max_tokens - len(spec.output_tokens) // TOKEN_BYTES <= 1
