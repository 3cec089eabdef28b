"""The HTTP frontend, compatible with the APIs of OpenAI, Anthropic and vLLM."""
