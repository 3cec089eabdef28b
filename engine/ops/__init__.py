"""A layer's products and the operations between them. Here are the contract (base.py), its form in torch for any device,
weights as codes, the choice of experts and teams of threads; cpu/ and cuda/ have kernels of our own."""
