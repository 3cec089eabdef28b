"""The version of this package, as the command line, routers and releases name it."""

from __future__ import annotations

VERSION = "0.1.0"
