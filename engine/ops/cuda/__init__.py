"""Kernels for CUDA, written in Triton, which all modules here need: a layer's small operations, products with quantised
weights, the conversion of parts. Those of attention are in engine/attention/triton_kernels.py."""
