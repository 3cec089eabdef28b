"""Speculation: tokens proposed beside a sequence's last one, computed in the same step, and kept while the model draws the
same ones. The output is the one without it."""
