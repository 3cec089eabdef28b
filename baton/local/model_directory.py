"""Whether a directory is a model's, said before any process starts: what is missing, and where it may be."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import BatonError, ConfigError
from cluster.protocol.model_limits import text_of

# One or two slashes: a Path joins those behind a scheme.
_HUB = re.compile(
    r"(?:hf:/{1,2}|https?:/{1,2}(?:www\.)?(?:huggingface\.co|hf\.co)/)?"
    r"(?P<name>\w[\w.-]*/\w[\w.-]*?)(?:(?:@|/(?:tree|blob)/)(?P<revision>[\w.-]+))?\Z"
)
_NAME = re.compile(r"[\w.-]+\Z")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?:/|\Z)")
_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"


def check_directory(directory: Path, flag: str, given: str | None = None) -> None:
    """Raise ConfigError if a worker and a router could not read `directory`, with what to do. `given`: the name as it was
    written."""
    named, field = _named(directory, flag, given), _field(flag)
    check_place(directory, flag, given)
    with _readable(named, field):
        _check_rights(directory, named, field)
        _check_files(directory, named, field)


def check_place(directory: Path, flag: str, given: str | None = None) -> None:
    """Raise ConfigError if there is no directory with a config.json; what else it holds is not looked at."""
    named, field = _named(directory, flag, given), _field(flag)
    with _readable(named, field):
        if not directory.exists():
            raise ConfigError(f"{named}: no such directory{_from_elsewhere(given or '')}", field=field)
        if not directory.is_dir():
            gguf = "; GGUF is not supported, safetensors are" if directory.suffix == ".gguf" else ""
            raise ConfigError(
                f"{named} is a file: name the directory that holds config.json{gguf}", field=field
            )
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{named}: no config.json there{_nearby(directory)}", field=field)


def _named(directory: Path, flag: str, given: str | None) -> str:
    return f"{flag}{'' if flag.endswith('=') else ' '}{given or directory}"


def _field(flag: str) -> str:
    return "also" if flag.startswith("--also") else "model"


@contextmanager
def _readable(named: str, field: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        denied = isinstance(error, PermissionError)
        raise ConfigError(
            f"{named} cannot be read ({error.strerror})"
            f"{': this user needs the right to read it and everything in it' if denied else ''}",
            field=field,
        ) from None


def _from_elsewhere(given: str) -> str:
    """How to get a model that is named by another place than a directory here."""
    if found := _HUB.match(given):
        source = f"hf://{found['name']}" + (f"@{found['revision']}" if found["revision"] else "")
        name = found["name"].rpartition("/")[2]
        return (
            f". A model of the Hugging Face Hub is downloaded first: baton fetch {source} --out {name}, then "
            f"baton up {name}"
        )
    found = _SCHEME.match(given)
    if found and found[1] != "hf":
        return (
            f". {found[1]}:// sources are not downloaded: copy the model to a local directory, and name that"
        )
    if found or _NAME.match(given):
        return (
            ". Models of the Hugging Face Hub are named ORG/NAME: baton fetch hf://ORG/NAME --out DIR, then "
            "baton up DIR"
        )
    return ""


def _nearby(directory: Path) -> str:
    """The end of an error's message: the kind of this directory, or one below or above it that has a config.json."""
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


def _check_rights(directory: Path, named: str, field: str) -> None:
    """Raise ConfigError for a file that may not be read: a worker would find it after its libraries are loaded."""
    for file in (*directory.glob("*.json"), *directory.glob("*.jinja"), *weight_files(directory)):
        if file.exists() and not os.access(file, os.R_OK):
            raise ConfigError(
                f"{named}: {file.name} cannot be read (Permission denied): this user needs the right to read every file "
                "there",
                field=field,
            )


def _check_files(directory: Path, named: str, field: str) -> None:
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            f"{named}: no tokenizer.json there; routers need the tokenizer in that form, which "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...) writes",
            field=field,
        )
    weights = list(weight_files(directory))
    if not weights:
        other = next(
            (one.name for one in sorted(directory.iterdir()) if one.suffix in (".bin", ".pth", ".gguf")), ""
        )
        raise ConfigError(
            f"{named}: no model.safetensors and no {_INDEX} there"
            + (
                f"; {other} is of a format that is not read: convert it with save_pretrained" if other else ""
            ),
            field=field,
        )
    for file in weights:
        if not file.exists():
            raise ConfigError(
                f"{named}: {file.name}, which {_INDEX} names, is missing: the download is not complete",
                field=field,
            )
        if file.stat().st_size < 1024 and file.is_file() and file.read_bytes().startswith(_POINTER):
            raise ConfigError(
                f"{named}: {file.name} is a pointer of Git LFS, not the weights: run git lfs pull there",
                field=field,
            )


def weight_files(directory: Path) -> Iterator[Path]:
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
