"""Attention over the paged cache: one contract, and backends of which one that works on the machine is chosen."""
