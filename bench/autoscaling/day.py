"""A day of requests: the trace's hour, end to end, thinned by an hourly profile.

`azure_conversation.csv.gz` is Azure's public conversation trace of 2023 (AzurePublicDataset, data/
AzureLLMInferenceTrace_conv.csv, commit b469a11, CC-BY 4.0, Microsoft) in another form: milliseconds since the
request before, prompt tokens, output tokens. The trace itself swings between 190 and 510 requests per minute; that
swing repeats every hour of the day, on top of the profile.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TRACE = Path(__file__).with_name("azure_conversation.csv.gz")
HOUR, HOURS = 3600.0, 24
SEED = 20231116
# Share of the trace's rate at the full hours of a working day; linear in between.
PROFILE: tuple[float, ...] = (0.45, 0.40, 0.36, 0.34, 0.34, 0.36, 0.44, 0.60, 0.80, 0.93, 0.98, 1.00)
PROFILE += (0.97, 0.98, 1.00, 0.98, 0.94, 0.88, 0.82, 0.78, 0.73, 0.66, 0.58, 0.50)


@dataclass(frozen=True)
class Requests:
    """Sorted by arrival."""

    arrival: NDArray[np.float64]  # seconds
    prompt: NDArray[np.float64]  # tokens
    output: NDArray[np.float64]  # tokens

    def __len__(self) -> int:
        return len(self.arrival)

    def by_hour(self, hours: int) -> NDArray[np.int64]:
        return np.bincount((self.arrival // HOUR).astype(np.int64), minlength=hours)


def read_trace() -> Requests:
    with gzip.open(TRACE, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float64)
    return Requests(np.cumsum(table[:, 0]) / 1000, table[:, 1], np.maximum(table[:, 2], 1))


def make_day(seed: int = SEED, hours: int = HOURS, first_hour: int = 0) -> Requests:
    """Draw the day; the same for the same seed, on every machine."""
    trace = read_trace()
    period = trace.arrival[-1] + (trace.arrival[-1] / len(trace))
    copies = int(np.ceil(hours * HOUR / period))
    arrival = np.concatenate([trace.arrival + copy * period for copy in range(copies)])
    prompt, output = np.tile(trace.prompt, copies), np.tile(trace.output, copies)
    share = np.interp(arrival / HOUR + first_hour, range(HOURS + 1), (*PROFILE, PROFILE[0]), period=HOURS)
    kept = (np.random.default_rng(seed).random(len(arrival)) < share) & (arrival < hours * HOUR)
    return Requests(arrival[kept], prompt[kept], output[kept])
