"""Completions, chats, embeddings and tokenising, as clients of OpenAI and vLLM call them."""
