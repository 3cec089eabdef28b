"""How bytes get into a peer's slot. `nixl` is the default, `grpc` the portable fallback."""
