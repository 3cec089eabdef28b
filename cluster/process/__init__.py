"""This process: memory, huge pages, descriptors, the death of its parent."""
