"""`baton doctor`: checks of a Kubernetes cluster before an install, and chart values that fit it.

reading.py reads the cluster into facts.py; checks.py checks them; values.py chooses the chart's values, with pods for
which the nodes have room (pods.py); report.py prints the result.
"""
