"""Masks of the tokens that a grammar allows next. A matcher is a function of the grammar and of the output's tokens."""
