"""Runs a model: cache, scheduler, attention, layers, sampling, tensor parallel. Knows nothing of networks."""
