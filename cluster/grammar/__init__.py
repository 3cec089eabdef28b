"""Grammars that an answer must match: their form on the wire, and how llguidance compiles them."""
