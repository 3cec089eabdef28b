"""What a router reports about its requests and the cluster: metrics, traces, the live view."""
