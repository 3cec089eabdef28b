"""Logs with request ids, Prometheus metrics, traces and probes."""
