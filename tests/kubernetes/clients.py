"""The official Python client, as tests use it: bodies are plain objects, answers are not None."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubernetes import client, config, watch


def connect(kubeconfig: Path) -> Any:
    """A client for a `with` statement."""
    connected: Any = config
    return connected.new_client_from_config(str(kubeconfig))


def core(api: Any) -> Any:
    return client.CoreV1Api(api)


def apps(api: Any) -> Any:
    return client.AppsV1Api(api)


def authorization(api: Any) -> Any:
    return client.AuthorizationV1Api(api)


def events(listing: Any, *arguments: Any, **options: Any) -> Any:
    """The events of a watch on what `listing` lists."""
    watching: Any = watch
    return watching.Watch().stream(listing, *arguments, **options)
