"""A request's arrival headers and spans."""
