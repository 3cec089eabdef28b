"""Two commits beside each other: `python -m bench.pairs --base COMMIT --pairs 20`."""
