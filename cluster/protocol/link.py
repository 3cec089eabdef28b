"""The link between a router process and a worker: its versions, its window, its times (proto/wire/link.proto)."""

from __future__ import annotations

# Versions of the link's messages that this process accepts: one apart works.
# 2: handles have 64 bits; the choices of an attempt share a window.
MIN_LINK_VERSION = 1
LINK_VERSION = 2
# Handles of version 1 have 32 bits. Once a router's next handle is so large it opens no link of version 1: the rest is
# more than it draws while a link lasts (an hour).
VERSION_1_HANDLES = 2**32 - 2**24

# Tokens of an attempt that a worker may send, and keeps, beyond what the router has acknowledged by its credit.
WINDOW_TOKENS = 256
MIN_WINDOW_TOKENS = 16  # of a choice, however many there are: credit is on its way while they are computed
PROMPT_WINDOW_ENTRIES = 8192  # log probabilities of a prompt that are on their way: 0.2 MiB as messages
SHARED_WINDOW_VERSION = 2  # before it, each choice has a whole window

# Most entries of a router's frame, numbers and credits together, because a parsed message takes 30 times its bytes.
# Attaches are bounded by the fewest bytes of one (an id of 16, handle and positions).
FRAME_ENTRIES = 2048
MIN_ATTACH_BYTES = 24

HELLO_SECONDS = 5.0  # from the connection to its first whole frame
ATTACH_SECONDS = 10.0  # from the connection to AttachDone
MAX_AGE_SECONDS = 3600.0  # of a link, ± AGE_SPREAD: certificates are checked again
AGE_SPREAD = 0.1
MOVE_SECONDS = 60.0  # after GO_AWAY the older link is cut
STATUS_SECONDS = 5.0  # a handle silent for this long is asked for
# Pauses before attempts at a broken link; the last one repeats. Without Welcome for LINK_LOST_SECONDS the worker is lost.
RETRY_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.25)
LINK_LOST_SECONDS = 0.7
WELCOME_SECONDS = 0.3  # beyond it, for a connection that stands: the worker's event loop may be late


def window_of(choices: int) -> int:
    """Tokens of each choice of an attempt: a client that does not read has about as much unread of many as of one."""
    return max(MIN_WINDOW_TOKENS, WINDOW_TOKENS // max(1, choices))


def prompt_window_of(alternatives: int) -> int:
    """Tokens of a prompt, with so many alternatives each, that a worker may send beyond the acknowledged ones."""
    return max(1, min(WINDOW_TOKENS, PROMPT_WINDOW_ENTRIES // (1 + alternatives)))


def common_version(min_version: int, max_version: int) -> int:
    """The highest version that both sides support; 0 if there is none."""
    version = min(max_version, LINK_VERSION)
    return version if version >= max(min_version, MIN_LINK_VERSION) else 0
