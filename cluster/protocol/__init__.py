"""Rules that routers and workers share: wire version, block hashes, first-token rule, limits of a model, classes
of priority."""
