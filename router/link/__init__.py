"""The router's side of the links to workers: connections, handles of attempts, suspect and lost workers."""
