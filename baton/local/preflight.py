"""Checks of `baton up` before any process is started: models, settings, adapters, devices, memory, files, ports.

A worker would find most of this too, after half a minute, and its reason would stand in a log.
"""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from cryptography.x509 import load_pem_x509_certificate

from baton.local import memory
from baton.local.model_directory import check_directory, weight_files
from baton.local.options import UpOptions
from baton.local.ray_pools import RAY
from cluster.config.worker import Role, WorkerConfig
from cluster.errors import ConfigError
from cluster.security.identity import make_identity
from cluster.security.key_file import read_keys
from cluster.sockets import listen
from engine.model.config import ModelConfig
from engine.model.preflight import least_bytes, least_context_bytes, read_model

# A worker alone has about a hundred open: libraries, sockets, shared memory.
LEAST_FILES = 256
_FLAG_OF_RANKS = {"prefill": "--prefill-tp", "decode": "--decode-tp"}


def check(options: UpOptions) -> None:
    """Raise ConfigError or ModelError with the first reason why the cluster could not start."""
    _check_limits()
    _check_ray(options)
    _check_files(options)
    _check_devices(options)
    _check_adapter_names(options)
    for further in options.models:
        directory = (options.model if further is None else further.model).absolute()
        check_directory(directory, "--model" if further is None else f"--also {further.name}=")
        for role in sorted({role for role, _ in options.workers}):
            _check_worker(options.worker_config(role, model=further), role)
            _check_host(options.worker_config(role, model=further), role)
    _check_ports(options)


def _check_limits() -> None:
    """Raise ConfigError for a limit that this process cannot raise, and that its processes would meet one by one."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < LEAST_FILES:  # below 0: without limit
        raise ConfigError(
            f"a process may open {files} files and connections here (ulimit -Hn), and each needs {LEAST_FILES} or more, a "
            "router one more for each client: raise the limit, as by ulimit -n 65536",
            field="nofile",
        )


def _check_ray(options: UpOptions) -> None:
    if options.pool == "ray" and not RAY.is_file():
        raise ConfigError(
            f"--pool ray: there is no {RAY}: pip install 'baton-serve[all]', or start without Ray by --pool process",
            field="pool",
        )


def _check_host(config: WorkerConfig, role: Role) -> None:
    try:
        listen(config.host, 0, 1).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--config: host {config.host} of {role} workers cannot be used ({reason}): give an address of this machine",
            field="host",
        ) from None


def _check_files(options: UpOptions) -> None:
    """Raise ConfigError for files that routers would fail on: API keys, certificates."""
    if (keys := options.router_config(0).api_keys_file) is not None:
        read_keys(keys)
    if (certs := options.certs) is None:
        return
    pairs = options.tls.router(), options.tls.worker()
    files = {file for pair in pairs for file in pair.values()}
    for file in sorted(files):
        if not file.is_file():
            raise ConfigError(
                f"--certs {certs}: no {file.name} there; baton certs --out {certs} makes all of them",
                field="certs",
            )
    _check_certificates(certs, pairs)


def _check_certificates(certs: Path, pairs: Sequence[Mapping[str, Path]]) -> None:
    """Raise ConfigError for files that do not belong together or have expired: routers and workers could not
    connect."""
    for own in pairs:
        make_identity(own["tls_cert"], own["tls_key"], own["tls_ca"])
        for file in (own["tls_ca"], own["tls_cert"]):
            ends = load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
            if ends < datetime.now(UTC):
                renew = f"baton certs --out {certs}"
                if file == own["tls_ca"]:  # which that command keeps
                    renew = f"remove {file} and {file.with_suffix('.key').name}, then {renew}"
                raise ConfigError(
                    f"--certs {certs}: {file.name} has expired ({ends:%Y-%m-%d}): {renew}", field="certs"
                )


def _check_devices(options: UpOptions) -> None:
    """Raise ConfigError for a CUDA card that this machine has not."""
    for role in sorted({role for role, _ in options.workers}):
        device = options.worker_config(role).engine.device
        if device.startswith("cuda") and not memory.has_driver():
            raise ConfigError(
                f"--device {device}: this machine has no CUDA driver; use --device cpu", field="device"
            )


def _check_adapter_names(options: UpOptions) -> None:
    """Raise ConfigError for an adapter that no request would reach."""
    router = options.router_config(0)
    models = {*router.model_names, *router.all_aliases}
    for role in sorted({role for role, _ in options.workers}):
        for name, directory in options.worker_config(role).engine.adapter_directories.items():
            if name in models:
                raise ConfigError(
                    f"--lora {name}={directory}: {name} is the name or an alias of a model, which its requests would "
                    "reach: name the adapter otherwise",
                    field="lora",
                )


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
    """Refuse weights that cannot fit, however small they become in memory, and a KV pool that cannot hold one context.
    The engine's own rule counts the rest."""
    engine, room = config.engine, config.engine.memory_bytes
    context = least_context_bytes(engine, model)
    if 0 < engine.kv_memory_bytes < context:
        length = engine.max_model_len or model.max_model_len
        raise ConfigError(
            f"--kv-memory {engine.kv_memory_bytes}: the KV of one context of {length} tokens "
            f"takes at least {context} bytes on each rank of a {role} worker: give more, or a smaller --max-model-len",
            field="kv_memory",
        )
    stored = sum(file.stat().st_size for file in weight_files(engine.model) if file.is_file())
    if not room or stored // engine.tensor_parallel <= room:
        return
    least = least_bytes(engine, model, weight_files(engine.model)) // engine.tensor_parallel
    if least > room:
        raise ConfigError(
            f"--model {engine.model}: its weights take at least {_gib(least)} on each of {engine.tensor_parallel} ranks "
            f"of a {role} worker, more than the {_gib(room)} that each rank may take here: use a smaller model"
            f"{' or --quantization int8' if engine.quantization == 'auto' else ''}, or start fewer workers",
            field="model",
        )


def _check_ports(options: UpOptions) -> None:
    own: dict[int, str] = {}
    with ExitStack() as taken:  # all at once: two of the routers' ports may be the same one
        for index in range(options.routers):
            router = options.router_config(index)
            for flag, port in (("--http-port", router.http_port), ("--grpc-port", router.grpc_port)):
                if port in own:
                    raise ConfigError(
                        f"{flag} {port} of router {index} is {own[port]} too: each router takes the next ports, so give "
                        f"--http-port and --grpc-port that are at least {options.routers} apart",
                        field=flag[2:].replace("-", "_"),
                    )
                if port:
                    own[port] = f"{flag} of router {index}"
                    taken.enter_context(_listener(flag, router.host, port))


def _listener(flag: str, host: str, port: int) -> socket.socket:
    """Listen as a router does. Raises ConfigError."""
    try:
        return listen(host, port, 1)
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
