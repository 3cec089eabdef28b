"""The commands of `baton`, one file each; every file starts only what it needs."""
