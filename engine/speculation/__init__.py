"""Speculative decoding: draft tokens are computed in the same step as a sequence's last token, and accepted as long as the
model draws the same tokens. The output does not change."""
