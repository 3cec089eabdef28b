"""The small model that ships with the project, and the demonstration that uses it."""
