"""Settings: their models, their sources, their files."""
