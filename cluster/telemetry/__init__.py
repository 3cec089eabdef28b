"""What the cluster says about itself: logs with request ids, metrics by Prometheus."""
