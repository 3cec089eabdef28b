"""The choice of a prefill and a decode worker: one atomic Redis script, one round trip."""
