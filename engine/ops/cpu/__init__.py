"""Kernels for the CPU, compiled by numba: norms, rotation, gates, attention of single tokens (kernels.py), what adapters
add, the conversion of parts. A team of threads runs them as jobs, one alone or a list of them. Subpackages have
products, attention over prompts, and what all kernels are made of."""
