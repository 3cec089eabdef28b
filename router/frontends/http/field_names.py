"""Names of fields in errors, where an endpoint's differ from those of chats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from cluster.errors import InvalidRequestError


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors within name the endpoint's fields. `names`: by the names that chats have."""
    try:
        yield
    except InvalidRequestError as error:
        name = names.get(error.field)
        if name is None:
            raise
        message = error.message
        if message.startswith(error.field):
            message = name + message.removeprefix(error.field)
        raise type(error)(message, field=name, limit=error.limit) from error
