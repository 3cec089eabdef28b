"""Shared by every process: config, errors, membership, block hashes, the radix index, telemetry."""
