"""A file of requests in OpenAI's batch format, sent to routers from the client's side."""
