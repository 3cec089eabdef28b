"""Our own client over gRPC: text as it comes, then where the time went."""

import baton

with baton.Client("127.0.0.1:50051") as client:
    stream = client.stream("def read_lines(path):\n", max_tokens=64, temperature=0)
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    timings = stream.timings
    if timings is not None:
        print(f"\nprefill {timings.prefill_seconds * 1000:.1f} ms on {timings.prefill_worker}, ", end="")
        print(f"{timings.kv_bytes_shipped} bytes of KV by {timings.transport or 'none'}")
