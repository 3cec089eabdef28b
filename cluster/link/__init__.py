"""Framing of the link between a router process and a worker. Its versions, windows and times: cluster/protocol/link.py."""
