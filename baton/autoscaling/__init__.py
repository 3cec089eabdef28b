"""How many replicas each pool needs: one policy for both, within one budget of GPUs."""
