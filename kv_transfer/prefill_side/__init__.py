"""The prefill worker's side of a hand-off: control stream, parts, writes."""
