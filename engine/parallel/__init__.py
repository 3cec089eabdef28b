"""Tensor parallel: ranks hold a share of every layer; the leader plans, ranks follow."""
