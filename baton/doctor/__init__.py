"""`baton doctor`: is this Kubernetes cluster ready for Baton, and which values fit it?

reading.py reads the cluster into facts.py; checks.py judges; values.py answers for the chart, with pods that room.py finds
nodes for and objects that rights.py says may be created; report.py shows it.
"""
