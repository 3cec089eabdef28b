"""`baton top`: the cluster, live in a terminal."""
