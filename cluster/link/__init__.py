"""The link between a router process and a worker: framing, versions and limits that both sides share."""
