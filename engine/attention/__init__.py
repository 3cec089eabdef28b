"""Attention over the paged cache: one contract, several backends, chosen by what the machine can do."""
