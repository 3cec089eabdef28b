"""Transports: they write a part into a slot of the peer. `registry` lists and chooses them."""
