"""What every process shares: config, errors, membership, block hashes, the radix index, telemetry."""
