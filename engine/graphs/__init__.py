"""Decode steps that are recorded once per size and replayed, as CUDA graphs are."""
