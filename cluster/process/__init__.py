"""This process: memory, huge pages, descriptors, the death of its parent; pauses before its children start again."""
