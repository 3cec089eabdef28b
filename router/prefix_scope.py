"""Who shares cached prefixes: those whose scope, a part of the salt of every block hash, is the same."""

from __future__ import annotations

import hashlib


def prefix_scope(tenant: str, cache_salt: str) -> str:
    """Of a tenant's requests, those with the same `cache_salt`; without one, those that have none."""
    if not cache_salt:
        return tenant
    owner = tenant.encode()
    digest = hashlib.blake2b(len(owner).to_bytes(4, "little") + owner + cache_salt.encode(), digest_size=16)
    return f"cache_salt:{digest.hexdigest()}"
