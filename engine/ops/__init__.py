"""The operations between a layer's products: by torch for any device, by own kernels for the CPU."""
