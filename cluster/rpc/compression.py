"""Servers take no compressed messages: 8 KiB of a peer's would become 8 MiB here before anything counts them."""

from __future__ import annotations

UNCOMPRESSED = ("grpc.compression_enabled_algorithms_bitset", 1)  # gRPC's list of algorithms begins with none
