"""The prefill role: computes a prompt, samples its first token, hands the KV cache over."""
