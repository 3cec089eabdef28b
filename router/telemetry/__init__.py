"""What a router says of its requests and of itself beside its answers: metrics by tenant and state, traces."""
