"""Linear layers, in the fastest form for the machine."""
