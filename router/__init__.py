"""HTTP and gRPC endpoints, placement, and the life of a request."""
