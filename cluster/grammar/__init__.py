"""Grammars that an answer must match: what travels with a request, and how it is read."""
