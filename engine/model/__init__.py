"""One decoder for every family."""
