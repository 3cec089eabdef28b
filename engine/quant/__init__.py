"""Weights in fewer bits than the model's dtype, and the layers that compute with them."""
