"""The page at `/ui`: live topology, percentiles over time, a playground. Plain files, nothing to build."""
