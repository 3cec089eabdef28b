"""Who may ask: API keys, hashed at rest, and the tenants they stand for."""
