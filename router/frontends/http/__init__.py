"""The HTTP frontend, compatible with OpenAI's API."""
