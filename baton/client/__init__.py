"""Clients of the public gRPC service.

    client = baton.Client("127.0.0.1:50051")
    for chunk in client.stream("def fib(n):", max_tokens=64):
        print(chunk.text, end="")

`Client` blocks, `AsyncClient` is for asyncio; both take the same arguments and return the same types
(`baton.client.types`). Given several routers, both go on with a broken stream at the next one.
"""

from __future__ import annotations

from baton.client.asynchronous import AsyncClient, AsyncStream
from baton.client.blocking import Client, Stream
from baton.client.types import (
    CallPiece,
    Choice,
    Chunk,
    Completion,
    Embeddings,
    EmbedInputs,
    EmbedOptions,
    GenerateOptions,
    Message,
    ModelInfo,
    Prompt,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from cluster.security.tls import ClientTls

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "CallPiece",
    "Choice",
    "Chunk",
    "Client",
    "ClientTls",
    "Completion",
    "EmbedInputs",
    "EmbedOptions",
    "Embeddings",
    "GenerateOptions",
    "Message",
    "ModelInfo",
    "Prompt",
    "Stream",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "Usage",
]
