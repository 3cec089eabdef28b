"""Worker pools on Ray Serve: the application, its replicas, the autoscaling adapter."""
