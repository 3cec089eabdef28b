"""Use and watch a cluster: `baton status`, `baton generate`, `baton chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.commands.output import console

Http = Annotated[str, typer.Option("--url", help="A router's HTTP address.")]
ApiKey = Annotated[
    str, typer.Option(envvar="BATON_API_KEY", help="Where the routers ask for keys.", show_default=False)
]
Grpc = Annotated[str, typer.Option("--target", help="A router's gRPC address; several with commas.")]


def status(
    url: Http = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    api_key: ApiKey = "",
) -> None:
    """Show workers, load, KV use, hit rate and hand-offs."""
    from baton.status import show

    show(url, as_json=as_json, api_key=api_key)


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    target: Grpc = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.")] = None,
    api_key: ApiKey = "",
) -> None:
    """Continue one prompt, streaming the text."""
    from baton.client import Client, GenerateOptions

    with Client(target.split(","), api_key=api_key) as client:
        options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature}
        if seed is not None:
            options["seed"] = seed
        stream = client.stream(prompt, **options)
        for chunk in stream:
            console.print(chunk.text, end="", markup=False)
    console.print()


def chat(
    target: Grpc = "127.0.0.1:50051",
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    api_key: ApiKey = "",
) -> None:
    """Talk to the model."""
    from baton.chat import run

    run(target.split(","), temperature=temperature, max_tokens=max_tokens, api_key=api_key)
