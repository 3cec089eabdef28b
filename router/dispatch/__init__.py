"""The life of a request: placement, attempts, merging of their streams, retries."""
