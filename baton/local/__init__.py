"""A whole cluster on this machine: `baton up`."""
