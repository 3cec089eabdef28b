"""Chained block hashes: one hash names a whole token prefix.

    block_hash[i] = BLAKE2b(key=deployment secret, block_hash[i-1] ‖ tokens of block i ‖ salt)     16 bytes

Token ids are little-endian uint32. Prompts of different models, adapters or tenants have different salts and share no
block. Only full blocks have a hash. The first 8 bytes are the key in the radix index; workers compare all 16.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 16
INDEX_KEY_BYTES = 8
_ROOT = bytes(HASH_BYTES)


def make_salt(model_id: str, adapter: str = "", tenant: str = "") -> bytes:
    """16-byte salt of (model, adapter, tenant), each length-prefixed so that no two triples collide."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (model_id, adapter, tenant):
        raw = part.encode()
        digest.update(struct.pack("<I", len(raw)) + raw)
    return digest.digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form of the wire and of the hashes."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`. Raises struct.error for bytes that are not whole ids."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def hash_block(parent: bytes | None, packed_block: bytes, *, secret: bytes, salt: bytes) -> bytes:
    """Hash of one full block after `parent` (None for the first block)."""
    message = (parent or _ROOT) + packed_block + salt
    return hashlib.blake2b(message, digest_size=HASH_BYTES, key=secret).digest()


def hash_blocks(packed: bytes, page_size: int, *, secret: bytes, salt: bytes) -> list[bytes]:
    """Hashes of every full block of a packed token list, in order. About 0.5 µs per block."""
    step = page_size * 4
    blake2b, parent = hashlib.blake2b, _ROOT
    return [
        parent := blake2b(
            parent + packed[begin : begin + step] + salt, digest_size=HASH_BYTES, key=secret
        ).digest()
        for begin in range(0, len(packed) - step + 1, step)
    ]


def index_keys(hashes: Sequence[bytes]) -> bytes:
    """The hashes' 8-byte index keys, packed: the argument of the radix index scripts."""
    return b"".join([block[:INDEX_KEY_BYTES] for block in hashes])
