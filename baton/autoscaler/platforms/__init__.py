"""Who starts and stops replicas: what the policy decides is told to one of these."""
