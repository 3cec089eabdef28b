"""Settings of one load run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

Protocol = Literal["grpc", "http"]
WorkloadName = Literal["plain", "shared", "conversation"]
PromptKind = Literal["text", "tokens", "chat"]
Arrival = Literal["poisson", "constant"]

MAX_SCHEDULED = 10_000_000  # sessions of an open loop: each is a number of a list that is made before the run
LARGEST = (
    2**32 - 1
)  # of numbers in requests of gRPC: protobuf would refuse a larger one in the middle of the run
LONGEST_SECONDS = (
    1e8  # gRPC counts nanoseconds in 64 bits: a time-out of 300 years would be one that has passed
)
DEFAULT_TARGETS: dict[Protocol, str] = {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000"}


class _Frozen(BaseModel):
    # A comparison lets NaN through, and infinity is the length of no schedule.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Slo(_Frozen):
    """Limits within which a request counts as good; None = no limit."""

    ttft_seconds: float | None = Field(None, gt=0, description="Limit of the time to the first token.")
    tpot_seconds: float | None = Field(None, gt=0, description="Limit of the mean seconds per later token.")
    e2e_seconds: float | None = Field(None, gt=0, description="Limit of the time to the last token.")


class LoadConfig(_Frozen):
    """One protocol, one workload, one way of arriving. Descriptions are the help of the flags of `baton load`.

    With `rate` the loop is open: requests are due on a schedule that is made before the run, whatever the server does, and
    every latency counts from the time at which the request was due. Without it the loop is closed: each of `concurrency`
    users waits for an answer and then sends the next request.
    """

    protocol: Protocol = "grpc"
    targets: tuple[str, ...] = Field((), description="servers; sessions use them in turn")
    model: str = Field("", description="Default: the first model that the server lists.")

    # Above the limit, one process cannot send on time; the schedule is a list, made before the run.
    rate: float | None = Field(
        None,
        gt=0,
        le=100_000,
        description="Open loop: requests per second, due on a schedule made before the run. A slow server does not delay "
        "them, and waiting counts as latency. Default: a closed loop.",
    )
    arrival: Arrival = Field("poisson", description="Open loop: poisson models independent users.")
    concurrency: int = Field(
        8,
        ge=1,
        description="Closed loop: users who each wait for their answer and then ask again at once. Measures the highest "
        "throughput of a server, not the latency of independent users.",
    )
    requests: int | None = Field(None, ge=1, description="Stop after this many requests.")
    seconds: float | None = Field(
        None, gt=0, description="Start no request later than this. Default: 30, if --requests is not given."
    )
    warmup_requests: int = Field(0, ge=0, description="Requests sent one by one before the run; not counted.")
    timeout_seconds: float = Field(
        120.0, gt=0, le=LONGEST_SECONDS, description="Deadline of a request, in seconds."
    )
    max_in_flight: int = Field(2048, ge=1, description="further requests wait, which counts as latency")

    workload: WorkloadName = Field(
        "plain",
        description="plain: prompts without a common prefix. shared: a system prompt that requests share, then a part of "
        "its own. conversation: each question follows all messages before it.",
    )
    prompt_kind: PromptKind | None = Field(
        None,
        description="text and chat are about as long as asked for, tokens exactly. Default: text; conversations are chat.",
    )
    prompt_tokens: int = Field(256, ge=1, description="Length of a prompt's own part.")
    prompt_spread: float = Field(0.0, ge=0, lt=1, description="Vary this length evenly by this share.")
    prefix_tokens: int = Field(256, ge=0, description="shared: length of the system prompt.")
    prefixes: int = Field(1, ge=1, description="shared: number of different system prompts.")
    turns: int = Field(4, ge=1, description="conversation: questions of each.")
    think_seconds: float = Field(
        0.0, ge=0, description="conversation: pause before the next question, in seconds."
    )
    system: str = Field("", description="conversation: system prompt")
    questions: tuple[str, ...] = Field((), description="conversation: file with one question per line.")
    vocab_size: int = Field(4096, gt=512, le=LARGEST, description="tokens: ids are drawn from 256 to this.")

    max_tokens: int = Field(64, ge=1, le=LARGEST, description="Length of the longest answer.")
    temperature: float = Field(0.0, ge=0, description="0 = greedy.")
    ignore_eos: bool = Field(False, description="Every answer has --max-tokens tokens (Baton, vLLM).")
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="http: further fields of the body, as JSON."
    )

    api_key: str = Field("", description="Sent with every request.", repr=False, exclude=True)
    tls_ca: Path | None = Field(None, description="Use TLS, and trust this authority.")
    tls_cert: Path | None = Field(
        None, description="Use TLS, and show this certificate, where the server requires one."
    )
    tls_key: Path | None = Field(None, description="Its key.")
    tls: bool = Field(False, description="gRPC: use TLS; for HTTP the target's https:// decides")

    seed: int = Field(0, description="The same seed gives the same prompts and the same schedule.")
    slo: Slo = Slo()
    keep_samples: int = Field(3, ge=0, description="answers kept for the report")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.requests is None) == (self.seconds is None):
            raise ValueError("exactly one of `requests` and `seconds` is needed")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("`tls_cert` and `tls_key` belong together: give both")
        if self.workload == "conversation" and self.prompt_kind not in (None, "chat"):
            raise ValueError("conversations are chat: leave `prompt_kind` out")
        if self.rate is not None and (self.requests or self.rate * (self.seconds or 0)) > MAX_SCHEDULED:
            raise ValueError(
                f"an open loop has at most {MAX_SCHEDULED} requests: give fewer seconds or requests"
            )
        # Else the errors of libraries would show it.
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: has characters that no header may have, as the end of a line")
        for target in self.targets if self.protocol == "http" else ():
            _check_http(target)
        return self

    @property
    def has_tls(self) -> bool:
        """Whether gRPC uses TLS; for HTTP the target's https:// decides."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None

    @property
    def kind(self) -> PromptKind:
        return self.prompt_kind or ("chat" if self.workload == "conversation" else "text")

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.targets or (DEFAULT_TARGETS[self.protocol],)

    @property
    def session_turns(self) -> int:
        return self.turns if self.workload == "conversation" else 1


def _check_http(target: str) -> None:
    try:
        parts = urlsplit(target if "//" in target else f"http://{target}")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket, a port above 65535
        good = False
    if not good:
        raise ValueError(f"{target!r}: an HTTP target is http://host:port or https://host:port")
