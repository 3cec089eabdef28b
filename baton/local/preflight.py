"""What can be known of a start before any process is started: model directories, their settings, adapters, memory, ports.

A worker would find most of this too, after half a minute, and its reason would stand in a log.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from baton.local.options import UpOptions
from cluster import addresses
from cluster.config.worker import Role, WorkerConfig
from cluster.errors import BatonError, ConfigError
from cluster.protocol.model_limits import text_of
from engine.model.config import ModelConfig
from engine.model.preflight import least_bytes, read_model

_HUB = re.compile(r"(?:hf:/{1,2})?([\w.-]+/[\w.-]+(?:@[\w.-]+)?)\Z")
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_FLAG_OF_RANKS = {"prefill": "--prefill-tp", "decode": "--decode-tp"}


def check(options: UpOptions) -> None:
    """Raise ConfigError or ModelError with the first reason why the cluster could not start."""
    for further in options.models:
        directory = (options.model if further is None else further.model).absolute()
        check_directory(directory, "--model" if further is None else f"--also {further.name}=")
        for role in sorted({role for role, _ in options.workers}):
            _check_worker(options.worker_config(role, model=further), role)
    _check_ports(options)


def check_directory(directory: Path, flag: str, given: str | None = None) -> None:
    """Raise ConfigError if `directory` is no model directory, with what to do. `given`: the name as it was written."""
    named = f"{flag}{'' if flag.endswith('=') else ' '}{given or directory}"
    try:
        if not directory.exists():
            raise ConfigError(f"{named}: no such directory{_from_the_hub(given or '')}", field="model")
        if not directory.is_dir():
            raise ConfigError(f"{named} is a file: name the directory that holds config.json", field="model")
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{named}: no config.json there{_nearby(directory)}", field="model")
        _check_files(directory, named)
    except OSError as error:
        denied = isinstance(error, PermissionError)
        raise ConfigError(
            f"{named} cannot be read ({error.strerror})"
            f"{': this user needs the right to read it and everything in it' if denied else ''}",
            field="model",
        ) from None


def _from_the_hub(given: str) -> str:
    found = _HUB.match(given)
    if found is None:
        return ""
    name = found[1].partition("@")[0].rpartition("/")[2]
    return (
        f". A model of the Hugging Face Hub is downloaded first: baton fetch hf://{found[1]} --out {name}, then "
        f"baton up {name}"
    )


def _nearby(directory: Path) -> str:
    """What the directory is instead, or the directory below or above it that has a config.json."""
    if (directory / "adapter_config.json").is_file():
        return ": it holds a LoRA adapter, which is served beside its base model: --lora NAME=DIR"
    for snapshot in sorted(directory.glob("snapshots/*"))[:1000]:  # the Hub's cache
        if (snapshot / "config.json").is_file():
            return f"; there is one in {snapshot}"
    places = [*sorted(one for one in directory.iterdir() if one.is_dir())[:1000], directory.parent]
    for place in places:
        if os.access(place, os.X_OK) and (place / "config.json").is_file():
            return f"; there is one in {place}"
    return ": name the directory of a model as Hugging Face saves it"


def _check_files(directory: Path, named: str) -> None:
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            f"{named}: no tokenizer.json there; routers need the tokenizer in that form, which "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...) writes",
            field="model",
        )
    weights = list(_weight_files(directory))
    if not weights:
        other = next(
            (one.name for one in sorted(directory.iterdir()) if one.suffix in (".bin", ".pth", ".gguf")), ""
        )
        raise ConfigError(
            f"{named}: no model.safetensors and no {_INDEX} there"
            + (
                f"; {other} is of a format that is not read: convert it with save_pretrained" if other else ""
            ),
            field="model",
        )
    for file in weights:
        if not file.exists():
            raise ConfigError(
                f"{named}: {file.name}, which {_INDEX} names, is missing: the download is not complete",
                field="model",
            )
        if file.stat().st_size < 1024 and file.is_file() and file.read_bytes().startswith(_POINTER):
            raise ConfigError(
                f"{named}: {file.name} is a pointer of Git LFS, not the weights: run git lfs pull there",
                field="model",
            )


def _weight_files(directory: Path) -> Iterator[Path]:
    index = directory / _INDEX
    if not index.is_file():
        if (directory / "model.safetensors").exists():
            yield directory / "model.safetensors"
        return
    try:
        found = json.loads(text_of(index))["weight_map"].values()
        yield from (directory / str(name) for name in sorted(set(found)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, BatonError):
        yield index  # the worker names what is wrong with it


def _check_worker(config: WorkerConfig, role: Role) -> None:
    engine = config.engine
    try:
        model = read_model(engine)
    except ConfigError as error:
        flag = (
            _FLAG_OF_RANKS[role] if error.field == "tensor_parallel" else "--" + error.field.replace("_", "-")
        )
        sentence = error.message.removeprefix(error.field).removeprefix(" ")
        raise ConfigError(f"{flag} {sentence}", field=error.field) from None
    for name, directory in engine.adapter_directories.items():
        if not (directory / "adapter_config.json").is_file():
            raise ConfigError(f"--lora {name}={directory}: no adapter_config.json there", field="lora")
    _check_memory(config, model, role)


def _check_memory(config: WorkerConfig, model: ModelConfig, role: Role) -> None:
    """Refuse weights that cannot fit, however small they become in memory. The engine's own rule counts the rest."""
    engine, room = config.engine, config.engine.memory_bytes
    stored = sum(file.stat().st_size for file in _weight_files(engine.model) if file.is_file())
    if not room or stored // engine.tensor_parallel <= room:
        return
    least = least_bytes(engine, model, _weight_files(engine.model)) // engine.tensor_parallel
    if least > room:
        raise ConfigError(
            f"--model {engine.model}: its weights take at least {_gib(least)} on each of {engine.tensor_parallel} ranks "
            f"of a {role} worker, more than the {_gib(room)} that each rank may take here: use a smaller model or "
            f"--quantization int8, or start fewer workers",
            field="model",
        )


def _check_ports(options: UpOptions) -> None:
    with ExitStack() as taken:  # all at once: two of the routers' ports may be the same one
        for index in range(options.routers):
            router = options.router_config(index)
            for flag, port in (("--http-port", router.http_port), ("--grpc-port", router.grpc_port)):
                if port:
                    taken.enter_context(_listener(flag, router.host, port))


def _listener(flag: str, host: str, port: int) -> socket.socket:
    """Listen as a router does. Raises ConfigError."""
    try:
        return addresses.listen(host, port, 1)
    except OSError as error:
        other = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"{flag} {port} on {host} cannot be used ({error.strerror}): "
            f"{'give another one, or 0 for any that is free' if other else 'the host of routers is no address here'}",
            field=flag[2:].replace("-", "_") if other else "host",
        ) from None
    except UnicodeError:
        raise ConfigError(f"{host!r} is not the name of a host", field="host") from None


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
