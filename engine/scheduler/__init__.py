"""What a step computes: every sequence catches up with its tokens within a budget."""
