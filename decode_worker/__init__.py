"""The decode role: takes over a request with its KV cache and runs it to its end in a continuous batch."""
