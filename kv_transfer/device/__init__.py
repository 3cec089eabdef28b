"""Work of a hand-off on a rank's device: copies of parts out of and into the KV cache, and their digests."""
