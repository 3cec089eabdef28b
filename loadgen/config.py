"""What one load run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

Protocol = Literal["grpc", "http"]
WorkloadName = Literal["plain", "shared", "conversation"]
PromptKind = Literal["text", "tokens", "chat"]
Arrival = Literal["poisson", "constant"]

DEFAULT_TARGETS: dict[Protocol, str] = {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Slo(_Frozen):
    """What a request must keep to count as good; a bound left out is not asked for."""

    ttft_seconds: float | None = Field(None, gt=0)
    tpot_seconds: float | None = Field(None, gt=0)
    e2e_seconds: float | None = Field(None, gt=0)


class LoadConfig(_Frozen):
    """One protocol, one workload, one way of arriving.

    With `rate` the loop is open: requests are due on a schedule made beforehand, whatever the server does,
    and every latency counts from the moment a request was due. Without it the loop is closed: `concurrency`
    users each wait for their answer before they ask again.
    """

    protocol: Protocol = "grpc"
    targets: tuple[str, ...] = Field((), description="servers; sessions take them in turn")
    model: str = Field("", description="empty = the first one the server names")

    # More than one process can send; the schedule is a list, made before the run.
    rate: float | None = Field(None, gt=0, le=100_000, description="requests a second, all sessions together")
    arrival: Arrival = "poisson"
    concurrency: int = Field(8, ge=1)
    requests: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, gt=0, description="no request starts later than this")
    warmup_requests: int = Field(0, ge=0, description="sent one by one before, and not counted")
    timeout_seconds: float = Field(120.0, gt=0, description="deadline of one request")
    max_in_flight: int = Field(2048, ge=1, description="requests due beyond this wait, and their clock runs")

    workload: WorkloadName = "plain"
    prompt_kind: PromptKind | None = Field(None, description="default: chat for conversations, else text")
    prompt_tokens: int = Field(256, ge=1, description="length of the part of a prompt that is its own")
    prompt_spread: float = Field(0.0, ge=0, lt=1, description="lengths vary evenly by this share")
    prefix_tokens: int = Field(256, ge=0, description="shared workload: length of the system prompt")
    prefixes: int = Field(1, ge=1, description="shared workload: how many different system prompts")
    turns: int = Field(4, ge=1, description="conversation workload: questions of one conversation")
    think_seconds: float = Field(
        0.0, ge=0, description="conversation workload: pause before the next question"
    )
    system: str = Field("", description="conversation workload: system prompt")
    questions: tuple[str, ...] = Field(
        (), description="conversation workload: what users ask, drawn at random"
    )
    vocab_size: int = Field(4096, gt=512, description="token prompts: ids are drawn from 256 to this")

    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0)
    ignore_eos: bool = Field(False, description="always generate max_tokens (Baton and vLLM)")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="HTTP: further fields of the body")

    api_key: str = Field("", description="sent with every request; in no report", repr=False, exclude=True)
    tls_ca: Path | None = Field(None, description="authority of https:// servers and of gRPC with TLS")
    tls_cert: Path | None = Field(None, description="gRPC: our certificate, where clients must show one")
    tls_key: Path | None = None
    tls: bool = Field(False, description="gRPC: speak TLS; https:// says so for HTTP")

    seed: int = 0
    slo: Slo = Slo()
    keep_samples: int = Field(3, ge=0, description="answers kept for the report")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.requests is None) == (self.seconds is None):
            raise ValueError("say how long: either `requests` or `seconds`")
        if self.workload == "conversation" and self.prompt_kind not in (None, "chat"):
            raise ValueError("conversations are chat: leave `prompt_kind` out")
        for target in self.targets if self.protocol == "http" else ():
            _check_http(target)
        return self

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
