"""Moves KV blocks between workers: contract, transports, part format, landing ring, fencing."""
