"""Tickets that prove that a router of this deployment admitted a request before.

    ticket = time of issue (u64, Unix seconds) ‖ BLAKE2b(key, time ‖ name ‖ seed ‖ amount)        24 bytes
    name   = BLAKE2b(tenant, request id, prompt), keyed by the model if it is not the router's first
    amount = the options that decide how much is computed, the grammar among them; the adapter, and how answers are parsed

The stream's first event carries the ticket. If the router dies, the client sends it to another one with the tokens that it
has received, and the request is not refused for being late. Tokens without a ticket are refused: a client could invent
them. A ticket without tokens belongs to a request that was charged and whose router died before the first token.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from collections.abc import Callable

from cluster.errors import InvalidRequestError
from router.request.completion import Completion

NAME_BYTES = 16
MAC_BYTES = 16
GRACE_SECONDS = 60.0  # routers' clocks may differ by as much, and a client may take as long to reconnect


def name_of(tenant: str, request_id: str, packed_prompt: bytes, further_model: str = "") -> bytes:
    """The name of a request at every router: requests with the same name have the same prompt, owner and model.
    `further_model`: "" for a router's first, so that tickets stay valid when a second one is added."""
    key = hashlib.blake2b(further_model.encode(), digest_size=32).digest() if further_model else b""
    digest = hashlib.blake2b(digest_size=NAME_BYTES, key=key)
    for part in (tenant.encode(), request_id.encode()):
        digest.update(struct.pack("<I", len(part)) + part)
    digest.update(packed_prompt)
    return digest.digest()


class Tickets:
    """Makes and checks tickets with the deployment's secret, without any state in routers or Redis."""

    def __init__(self, secret: str, request_seconds: float, clock: Callable[[], float] = time.time):
        """`request_seconds`: the longest duration of a request; tickets expire GRACE_SECONDS after it."""
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"baton-resume").digest()
        self._seconds = request_seconds + GRACE_SECONDS
        self._clock = clock

    def issue(self, completion: Completion, name: bytes) -> bytes:
        return self._ticket(int(self._clock()), completion, name)

    def check(self, completion: Completion, name: bytes) -> bool:
        """Whether the ticket is valid for this request.

        Raises InvalidRequestError if it is not and the request holds tokens.
        """
        valid = self._is_valid(completion, name)
        if completion.resume_tokens and not valid:
            raise InvalidRequestError(
                "resume_ticket: resume_tokens require the ticket, the seed and the request_id of this request's first "
                f"event, at most {self._seconds:.0f} s old, the same options, and a router with the same tool_parser "
                "and reasoning_parser; or send the request again without resume_tokens",
                field="resume_ticket",
            )
        return valid

    def _is_valid(self, completion: Completion, name: bytes) -> bool:
        ticket = completion.resume_ticket
        if len(ticket) != 8 + MAC_BYTES:
            return False
        (issued,) = struct.unpack_from("<Q", ticket)
        expected = self._ticket(issued, completion, name)
        return hmac.compare_digest(ticket, expected) and abs(self._clock() - issued) <= self._seconds

    def _ticket(self, issued: int, completion: Completion, name: bytes) -> bytes:
        s, when = completion.sampling, struct.pack("<Q", issued)
        amount = (s.max_tokens, s.min_tokens, s.ignore_eos, s.top_logprobs, completion.n)
        message = when + name + struct.pack("<QII?II", s.seed, *amount)
        message += completion.adapter.encode()  # none or 32 digits
        if completion.grammar is not None:
            message += completion.grammar.SerializeToString(deterministic=True)
        parsed = completion.answer_format
        salt = b"" if parsed is None else hashlib.blake2b(parsed.name.encode(), digest_size=16).digest()
        return when + hashlib.blake2b(message, digest_size=MAC_BYTES, key=self._key, salt=salt).digest()
