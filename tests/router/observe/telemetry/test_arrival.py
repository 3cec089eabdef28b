"""Which trace a request belongs to, by its headers."""

from __future__ import annotations

import pytest

from router.observe.traces import Arrival


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], {}),
        ([("traceparent", "p")], {"traceparent": "p", "tracestate": ""}),
        (
            [("traceparent", "p"), ("tracestate", "a=1"), ("tracestate", "b=2")],
            {"traceparent": "p", "tracestate": "a=1,b=2"},
        ),
        ([("traceparent", "p"), ("traceparent", "q")], {}),
    ],
)
def test_a_trace_is_taken_over_from_one_valid_header(
    headers: list[tuple[str, str]], expected: dict[str, str]
) -> None:
    arrival = Arrival(lambda name: [value for key, value in headers if key == name])
    assert arrival.trace_headers == expected
