"""Which KV heads and blocks go where: geometry, copies, compatibility, digests."""
