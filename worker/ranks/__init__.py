"""The tensor-parallel ranks of a worker: local, in child processes, on other nodes."""
