"""Typed errors and health over gRPC."""
