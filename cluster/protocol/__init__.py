"""Rules that processes share: versions, times and windows of the protocol, block hashes, the first-token rule, KV formats,
classes of priority, and what a model's files say."""
