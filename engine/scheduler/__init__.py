"""Sequences, and what each step computes: every sequence catches up with its tokens within a budget."""
