"""Front doors, placement, and the life of a request."""
