"""The two protocols a router serves: HTTP (OpenAI) and gRPC."""
