"""Names of fields in errors, where an endpoint's differ from those of chats."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

from cluster.errors import DeadlineError, InvalidRequestError, OverloadedError


@contextlib.contextmanager
def renamed(names: Mapping[str, str], parts: Sequence[tuple[re.Pattern[str], str]]) -> Iterator[None]:
    """Errors within name the endpoint's fields. `names`: by the names that chats have; `parts`: patterns within a name
    and a message, and what replaces them."""
    try:
        yield
    except (InvalidRequestError, DeadlineError, OverloadedError) as error:
        field, message = error.field, error.message
        name = names.get(field, field)
        if message.startswith(field):
            message = name + message.removeprefix(field)
        for pattern, new in parts:
            name, message = (pattern.sub(new, text) for text in (name, message))
        if (name, message) == (field, error.message):
            raise
        raise type(error)(
            message, field=name, limit=error.limit, retry_after_seconds=error.retry_after_seconds
        ) from error
