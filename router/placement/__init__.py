"""Which prefill worker, which decode worker: one atomic Redis script, one round trip."""
