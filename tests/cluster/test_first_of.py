"""The error that a client gets when several choices of its request fail."""

from __future__ import annotations

from cluster.errors import UnavailableError, first_of


def test_a_typed_error_goes_before_all_others():
    wanted = UnavailableError("no decode worker")
    inner = BaseExceptionGroup("choices", [ValueError("x"), BaseExceptionGroup("more", [wanted])])
    assert first_of(BaseExceptionGroup("all", [KeyError("y"), inner])) is wanted


def test_without_one_it_is_the_first():
    first = KeyError("y")
    assert first_of(BaseExceptionGroup("all", [first, ValueError("x")])) is first
