"""Several processes that are one router: one port pair, common limits, merged metrics (docs/router-processes.md)."""
