"""A request after validation: its model, its checks, its resume ticket, its prefix scope."""
