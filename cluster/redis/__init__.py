"""Talking to Redis: connections with deadlines, scripts, and the embedded server."""
