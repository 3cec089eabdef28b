"""A router's reports on its requests and the cluster: metrics, traces, the live view."""
