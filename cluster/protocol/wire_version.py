"""The version of the protocol between the processes of a deployment (docs/wire-versions.md)."""

from __future__ import annotations

from cluster.errors import WireVersionError

# 2: Drained is acknowledged; digests are agreed in Hello; an attempt that ends with its first token has no decode worker.
# 3: one link per router process and worker carries tokens, cancels and credits; Run is a unary call.
# 4: a token is drawn as the largest of logit and noise, so a stream goes on only among workers that draw so.
# 5: a request may have a grammar, which its workers must not leave out.
# 6: tools, reasoning and parsed parts; a request may be for an adapter, which its workers must not leave out.
# 7: log probabilities of a prompt are sent within the router's credit.
# 8: a request may be for an embedding, which its workers must not leave out.
# 9: a request may exclude tokens (allowed_tokens, bad_words), which its workers must not leave out.
WIRE_VERSION = 9


def check_wire_version(version: int, worker_id: str) -> None:
    """Check the version of a received request. Raises WireVersionError."""
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"{worker_id} has wire version {WIRE_VERSION}, the request has {version}: "
            f"upgrade whichever is older",
            field="wire_version",
            limit=str(WIRE_VERSION),
        )
