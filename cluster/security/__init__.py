"""API keys and TLS identities."""
