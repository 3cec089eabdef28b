"""The life of a request: placed, attempted, merged, retried, ended."""
