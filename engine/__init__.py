"""Runs a model: cache, scheduler, attention, layers, sampling, tensor parallel. No network."""
