"""Named points at which a test may break a process. Off by default: then a point is a function that does nothing."""
