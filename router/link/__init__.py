"""The router's side of the links to workers: one per worker, the handles of its attempts, and what silence means."""
