"""What a hand-off does on a rank's device: copies parts out of and into the KV cache, and computes their digests."""
