"""The scope within which requests share cached prefixes; it is part of the salt of every block hash."""

from __future__ import annotations

import hashlib


def prefix_scope(tenant: str, cache_salt: str) -> str:
    """Scope of a request: its tenant's requests with the same `cache_salt`, or those without one."""
    if not cache_salt:
        return tenant
    owner = tenant.encode()
    digest = hashlib.blake2b(len(owner).to_bytes(4, "little") + owner + cache_salt.encode(), digest_size=16)
    return f"cache_salt:{digest.hexdigest()}"
