"""Workers' reports of their work, as far as they can be true.

A router learns from them what work costs, at any worker, and sums them up in metrics and in the live view. So one false
report would change the placement of every later request: a report with a value that cannot be true is left out whole.
"""

from __future__ import annotations

import logging

from cluster.protocol.names import MAX_NAME
from cluster.telemetry.logs import is_logged
from wire import common_pb2

log = logging.getLogger(__name__)
SLACK_SECONDS = 1.0  # clocks of two machines do not run at quite the same rate
MAX_TIMES = 64  # that the tokens of a request are computed: again after each preemption, and for each choice
MAX_TOKEN_BYTES = 16 << 20  # of a token's KV, in all layers
MAX_TRANSPORT = 64  # characters
_SECONDS = {one.name for one in common_pb2.WorkReport.DESCRIPTOR.fields if one.name.endswith("_seconds")}
_TOKENS = ("cached_tokens", "computed_prompt_tokens", "not_shipped_tokens")


class WorkReports:
    """Checks the reports of all requests of a router, and counts those left out."""

    def __init__(self) -> None:
        self.dropped = 0

    def checked(
        self, report: common_pb2.WorkReport, worker_id: str, *, seconds: float, tokens: int
    ) -> common_pb2.WorkReport:
        """The report, or an empty one in place of a false one. `seconds`: since the attempt began; `tokens`: that it
        was to compute."""
        false = _false(report, seconds + SLACK_SECONDS, MAX_TIMES * tokens)
        if not false:
            return report
        self.dropped += 1
        if is_logged(self.dropped):
            log.warning(
                "worker %s reports what cannot be true; the report is left out (number %d): %s",
                *(worker_id, self.dropped, false),
            )
        return common_pb2.WorkReport()


def _false(report: common_pb2.WorkReport, most_seconds: float, most_tokens: int) -> str:
    """A value of the report that cannot be true, in words; "" if there is none."""
    for field, value in report.ListFields():  # without those that are 0
        name = field.name
        if name in _SECONDS and not 0 <= value <= most_seconds:
            return f"{name} is {value:g} where the attempt has taken {most_seconds - SLACK_SECONDS:.3f} s"
        if name in _TOKENS and value > most_tokens:
            return f"{name} is {value} of at most {most_tokens}"
    if report.kv_bytes_shipped > most_tokens * MAX_TOKEN_BYTES:
        return f"kv_bytes_shipped is {report.kv_bytes_shipped} of at most {most_tokens} tokens"
    if len(report.worker_id) > MAX_NAME or len(report.transport) > MAX_TRANSPORT:
        return "a name is too long"
    if not (report.worker_id + report.transport).isprintable():  # answers show them, in headers too
        return "a name is not printable"
    return ""
