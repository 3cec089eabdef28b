"""The commands of `baton`, one module each, and the flags they share."""
