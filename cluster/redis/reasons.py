"""Why a call of Redis failed, for log lines."""

from __future__ import annotations

import redis


def reason(error: Exception) -> str:
    """A Redis that answers is not out of reach: it may have no rights for this user, or another value under the key."""
    if isinstance(error, redis.ResponseError):
        return f"Redis answers with an error: {error}"
    if isinstance(error, redis.InvalidResponse):
        return f"Redis's answer is not valid: {error}"
    return f"Redis is out of reach: {str(error) or 'too slow'}"
