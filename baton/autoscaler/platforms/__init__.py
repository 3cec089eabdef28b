"""Platforms that start and stop replicas."""
