"""The Kubernetes API: this process's pod, and proofs that other pods' processes have exited."""
