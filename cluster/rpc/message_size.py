"""The largest message of a call to a worker, for both of its ends.

On the gRPC transport a part is one message; a prompt has 4 bytes per token.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20
MESSAGE_LIMITS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
