"""Fault injection at named points. Off by default: a point is then a function that does nothing."""
