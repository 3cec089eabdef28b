"""Limits on requests, body bytes, connections and descriptors."""
