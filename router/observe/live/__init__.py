"""What the cluster is doing now and has done in the last minutes, for people who watch: `/v1/cluster/live`."""
