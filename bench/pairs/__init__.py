"""Compare two commits: `python -m bench.pairs --base COMMIT --pairs 20`."""
