"""`baton doctor`: is this Kubernetes cluster ready for Baton, and which values fit it?

facts.py reads the cluster, checks.py judges, values.py answers for the chart, report.py shows it.
"""
