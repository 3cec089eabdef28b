"""The figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from loadgen.config import LoadConfig
from loadgen.record import STAGES, Failure, RequestRecord

_MAX_MESSAGES_PER_KIND = 3
# Figures of the JSON report
_LATENCIES = ("ttft", "itl", "tpot", "e2e", "send_lag")
_COUNTS = (
    *("output_tokens", "output_tokens_per_second", "prompt_tokens", "cached_tokens"),
    *("kv_bytes_shipped", "kv_shipped_requests", "transport"),
)


@dataclass(frozen=True)
class Summary:
    """A distribution of `count` values, in seconds; without any, all figures are 0."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def summarise(values: Sequence[float]) -> Summary:
    if not values:
        return Summary()
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return Summary(len(values), float(array.mean()), float(p50), float(p90), float(p99), float(array.max()))


@dataclass(frozen=True)
class Report:
    """The records of a run and everything computed from them.

    Failed requests count as offered and as failed; latencies are those of the requests that were answered.
    """

    configs: tuple[LoadConfig, ...]
    records: Sequence[RequestRecord]
    started_unix: float

    @cached_property
    def answered(self) -> list[RequestRecord]:
        return [record for record in self.records if record.ok]

    @property
    def requests(self) -> int:
        return len(self.records)

    @property
    def failed(self) -> int:
        return len(self.records) - len(self.answered)

    @cached_property
    def seconds(self) -> float:
        """From the time at which the first request was due to the last token."""
        if not self.answered:
            return 0.0
        first = min(record.intended for record in self.records)
        return max(record.arrivals[-1][0] for record in self.answered) - first

    @cached_property
    def ttft(self) -> Summary:
        return summarise([record.ttft for record in self.answered])

    @cached_property
    def itl(self) -> Summary:
        return summarise([gap for record in self.answered for gap in record.gaps])

    @cached_property
    def tpot(self) -> Summary:
        return summarise([tpot for record in self.answered if (tpot := record.tpot) is not None])

    @cached_property
    def e2e(self) -> Summary:
        return summarise([record.e2e for record in self.answered])

    @cached_property
    def send_lag(self) -> Summary:
        """How late requests were sent: the load generator was slow, or `max_in_flight` was reached."""
        return summarise([record.sent - record.intended for record in self.answered])

    @property
    def output_tokens(self) -> int:
        return sum(record.output_tokens for record in self.answered)

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.answered)

    @property
    def cached_tokens(self) -> int:
        return sum(record.cached_tokens for record in self.answered)

    @property
    def goodput(self) -> float:
        """The share of the offered requests that kept their SLO."""
        if not self.records:
            return 0.0
        return sum(record.good for record in self.records) / self.requests

    @property
    def errors(self) -> dict[str, int]:
        """Failures by kind, the most frequent first."""
        return dict(Counter(failure.kind for failure in self._failures()).most_common())

    @cached_property
    def stages(self) -> dict[str, Summary]:
        """The server's seconds by stage; stages that it did not report are left out."""
        reported = [record.stages for record in self.answered]
        by_stage = {stage: [one[stage] for one in reported if stage in one] for stage in STAGES}
        return {stage: summarise(seconds) for stage, seconds in by_stage.items() if seconds}

    @property
    def kv_bytes_shipped(self) -> int:
        return sum(record.timings.kv_bytes_shipped for record in self.answered if record.timings)

    @property
    def kv_shipped_requests(self) -> int:
        return sum(1 for record in self.answered if record.timings and record.timings.kv_bytes_shipped)

    @property
    def no_handoff(self) -> str:
        """Why no KV was handed over, as far as Baton's timings tell; empty if some was, or without timings."""
        timings = [record.timings for record in self.answered if record.timings]
        if not timings or self.kv_shipped_requests:
            return ""
        if any(one.prefill_worker for one in timings):
            return (
                "prefill workers computed prompts, and no decode worker needed their KV: answers ended with their first "
                "token, or it was cached there"
            )
        return (
            "decode workers computed all prompts: they were short (local_prefill auto), or no prefill worker was ready; "
            "baton status says which"
        )

    @property
    def transport(self) -> str:
        """The transports of the KV, separated by commas."""
        used = Counter(record.timings.transport for record in self.answered if record.timings)
        return ",".join(name for name, _ in used.most_common() if name)

    @property
    def placement_calls_per_request(self) -> float:
        return self._per_request("placement_calls")

    def of_protocol(self, protocol: str) -> Report:
        return Report(
            tuple(config for config in self.configs if config.protocol == protocol),
            [record for record in self.records if record.protocol == protocol],
            self.started_unix,
        )

    @property
    def protocols(self) -> list[str]:
        return list(dict.fromkeys(config.protocol for config in self.configs))

    def samples(self) -> list[RequestRecord]:
        return [record for record in self.answered if record.sample_answer]

    def to_json(self) -> dict[str, Any]:
        """Plain data; docs/results.md and scripts use these names."""
        found = self._figures()
        if len(self.protocols) > 1:
            found["by_protocol"] = {name: self.of_protocol(name)._figures() for name in self.protocols}
        found["error_messages"] = self.error_messages()
        found["error_targets"] = self.error_targets()
        found["samples"] = [
            {"prompt": record.sample_prompt, "answer": record.sample_answer} for record in self.samples()
        ]
        found["started_unix_seconds"] = self.started_unix
        found["config"] = [config.model_dump(mode="json") for config in self.configs]
        return found

    def _figures(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("requests", "failed", "seconds")},
            **{f"{name}_seconds": asdict(getattr(self, name)) for name in _LATENCIES},
            "goodput": self.goodput,
            "requests_per_second": len(self.answered) / self.seconds if self.seconds else 0.0,
            **{name: getattr(self, name) for name in _COUNTS},
            "placement_calls_per_request": self.placement_calls_per_request,
            "attempts_per_request": self._per_request("attempts"),
            "stages": {stage: summary.p50 for stage, summary in self.stages.items()},
            "stages_p99": {stage: summary.p99 for stage, summary in self.stages.items()},
            "errors": self.errors,
        }

    def _per_request(self, name: str) -> float:
        said = [getattr(record.timings, name) for record in self.answered if record.timings]
        return sum(said) / len(said) if said else 0.0

    def _failures(self) -> Iterable[Failure]:
        return (record.failure for record in self.records if record.failure is not None)

    def error_messages(self) -> dict[str, list[str]]:
        """Kind of failure → its first few distinct messages."""
        return self._first_few(lambda failure: failure.message)

    def error_targets(self) -> dict[str, list[str]]:
        """Kind of failure → the first few distinct targets that it came from."""
        return self._first_few(lambda failure: failure.target)

    def _first_few(self, what: Callable[[Failure], str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for failure in self._failures():
            known, said = found.setdefault(failure.kind, []), what(failure)
            if said not in known and len(known) < _MAX_MESSAGES_PER_KIND:
                known.append(said)
        return found


def merge(reports: Sequence[Report]) -> Report:
    """One report over several runs. Each has its own clock; wall time aligns them."""
    start = min(report.started_unix for report in reports)
    records: list[RequestRecord] = []
    for report in reports:
        records.extend(_shifted(record, report.started_unix - start) for record in report.records)
    return Report(tuple(config for report in reports for config in report.configs), records, start)


def _shifted(record: RequestRecord, by: float) -> RequestRecord:
    if by == 0.0:
        return record
    return replace(
        record,
        intended=record.intended + by,
        sent=record.sent + by,
        arrivals=[(at + by, tokens) for at, tokens in record.arrivals],
    )
