"""Redis connections with deadlines, and the embedded server."""
