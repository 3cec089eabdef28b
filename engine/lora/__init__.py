"""Low-rank adapters: their files, a rank's buffers, and the products that apply them."""
