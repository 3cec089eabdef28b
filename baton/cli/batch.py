"""`baton batch`: a file of requests, in OpenAI's batch format."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.client_commands import ApiKey, TlsCa, TlsCert, TlsKey, client_tls
from baton.cli.output import console, say

if TYPE_CHECKING:
    from baton.batch.run import Tally


def batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Requests, one per line.", show_default=False)
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="Answers are appended as they come.", show_default=False),
    ],
    url: Annotated[
        list[str], typer.Option("--url", help="A router's HTTP address; repeatable, they are used in turn.")
    ] = ["http://127.0.0.1:8000"],  # noqa: B006 (typer wants a list, and copies it)
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests in flight at a time.")] = 32,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one attempt.")] = 600.0,
    retry_seconds: Annotated[
        float,
        typer.Option(min=0, help="How long a request is sent again after 429, 503 or a lost connection."),
    ] = 600.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Send failed requests of earlier runs again.")
    ] = False,
    api_key: ApiKey = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Send a file of requests in OpenAI's batch format, and write the answers to another.

    A line of INPUT: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; also
    /v1/completions, /v1/responses and /v1/embeddings. Every line is checked before any is sent. Requests have the
    class batch unless the body says otherwise. The same command again goes on where a run ended: what OUTPUT answers is
    not sent.

    Exit code 1: some requests failed; OUTPUT says why.
    """
    from baton.batch.run import run_batch
    from baton.batch.sending import Sending

    tls = client_tls(tls_ca, tls_cert, tls_key)
    sending = Sending(tuple(url), api_key, tls, concurrency, timeout, retry_seconds)
    start = time.monotonic()
    with _Bar() as bar:
        tally = run_batch(source, target, sending, retry_failed=retry_failed, show=bar.show)
    _summary(tally, time.monotonic() - start)
    if tally.failed or tally.earlier_failed:
        raise typer.Exit(1)


class _Bar:
    """The progress bar; none where the output is no terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            BarColumn(bar_width=28),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[tokens]}  left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("batch", total=None, done="reading", tokens="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, tally: Tally) -> None:
        finished = tally.succeeded + tally.failed
        failed = f", {tally.failed} failed" if tally.failed else ""
        self._bar.update(
            self._task,
            total=tally.left,
            completed=finished,
            done=f"{finished}/{tally.left} requests{failed}",
            tokens=f"{tally.answer_tokens:,} tokens",
        )


def _summary(tally: Tally, seconds: float) -> None:
    from baton.formatting import count, duration, rate

    earlier = f", {count(tally.earlier)} answered earlier" if tally.earlier else ""
    earlier += f" ({count(tally.earlier_failed)} of them failed)" if tally.earlier_failed else ""
    say(
        f"{count(tally.succeeded)} of {count(tally.left)} requests succeeded, {count(tally.failed)} failed{earlier}"
    )
    per_second = rate(tally.answer_tokens / seconds) if seconds > 0 else "0"
    say(
        f"{count(tally.prompt_tokens)} prompt tokens, {count(tally.answer_tokens)} answer tokens "
        f"in {duration(seconds)} ({per_second} tokens/s)"
    )
