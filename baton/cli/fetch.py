"""`baton fetch`: what a user, or a pod's init container, runs for a model from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import progress_console, say


def fetch(
    source: Annotated[str, typer.Argument(help="hf://ORG/NAME or hf://ORG/NAME@REVISION.")],
    out: Annotated[Path, typer.Option(help="Directory for the model.")],
    endpoint: Annotated[str, typer.Option(help="The Hub, or a mirror.")] = "https://huggingface.co",
    seconds: Annotated[float, typer.Option(min=1, help="Longest time without progress, in seconds.")] = 600.0,
    sha256: Annotated[
        str,
        typer.Option(help="The hash that an earlier run printed last; files with another one are refused."),
    ] = "",
    without_weights: Annotated[
        bool, typer.Option("--without-weights", help="Fetch only what a router reads: no weights.")
    ] = False,
) -> None:
    """Download a model from the Hugging Face Hub, checking every file's hash; HF_TOKEN for gated ones."""
    from baton.download.fetch import fetch as fetch_model
    from baton.download.listing import manifest_digest
    from baton.download.report import report_on

    with report_on(progress_console()) as report:
        files = fetch_model(
            source,
            out,
            endpoint=endpoint,
            seconds=seconds,
            sha256=sha256,
            weights=not without_weights,
            report=report,
        )
    say(f"{out} holds {source}")
    say(f"sha256 {manifest_digest(files)}")
