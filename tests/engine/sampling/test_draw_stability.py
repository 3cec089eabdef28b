"""A sampled stream hardly depends on the requests beside it: in bf16 their number changes the last bits of the logits."""

from __future__ import annotations

from dataclasses import replace

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from tests.engine.ranks import KV_BYTES, engine_of, run
from tests.harness.checkpoints import prompt_ids

STREAMS, TOKENS = 8, 40


def test_sampled_tokens_in_bf16_are_those_of_a_request_alone(checkpoint):
    """Each request runs once more alone; where a token differs, it goes on after the token of the batch."""
    settings = EngineConfig(model=checkpoint("llama"), dtype="bfloat16", kv_memory_bytes=KV_BYTES)
    runner = ModelRunner(load_model(settings))
    requests = [
        EngineRequest(
            f"r{number}",
            prompt_ids(20 + 3 * number, seed=number),
            SamplingParams(temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True),
        )
        for number in range(STREAMS)
    ]
    together = run(engine_of(runner), *requests).tokens
    alone, different = engine_of(runner), 0
    for request in requests:
        output, done = together[request.request_id, 0], 0
        while done < TOKENS:
            rest = replace(request, output_tokens=output[:done], salt=done.to_bytes(16))
            found = run(alone, rest).tokens[request.request_id, 0]
            same = next((i for i, token in enumerate(found) if token != output[done + i]), len(found))
            different += same < len(found)
            done += same + 1
    assert different <= 0.01 * STREAMS * TOKENS
