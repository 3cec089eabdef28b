"""A day of the Azure conversation trace against the autoscaling policy, in simulated time."""
