"""The decode worker's side of a hand-off: landing ring, fencing, verification, commit."""
