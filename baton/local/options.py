"""The options of `baton up`, and the configurations of routers and workers that follow from them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from baton import safe_files
from baton.autoscaler.config import ServeAutoscalingConfig
from baton.local import memory
from baton.local.model_directory import check_place
from baton.local.tls import LocalTls
from cluster.config import sources
from cluster.config.base import Frozen, flag_text, flags, no_flag
from cluster.config.reasons import reason
from cluster.config.router import FurtherModel, RouterConfig
from cluster.config.speculation import without_drafts
from cluster.config.unknown import no_such_setting
from cluster.config.worker import ROLES, Role, WorkerConfig
from cluster.errors import ConfigError
from cluster.process.memory import limits
from cluster.protocol.draft_model import check_draft_model
from cluster.redis.connect import check_url
from cluster.redis.urls import split_password, with_hash_tag

# A decode worker recomputes preempted requests up to this length. For longer ones a prefill worker is faster, because most
# of the prompt is in its cache, and it does not delay the running batch.
RECOMPUTE_LIMIT_TOKENS = 256
# Prefill steps may be long; a decode worker that prefills delays its running batch by one chunk at most.
BATCH_TOKENS: Mapping[Role, int] = {"prefill": 2048, "decode": 512}
_FLAGS: Mapping[tuple[Any, ...], str] = {**flags(RouterConfig), **flags(WorkerConfig)}
SECTIONS = ("router", "worker", *ROLES)
_ADAPTERS = ("lora", "max_loras", "max_lora_rank")
ROUTER_DRAIN_SECONDS = 5.0  # a stop by Ctrl-C does not wait for every stream


class UpOptions(Frozen):
    """Settings of `baton up`. `router` and `worker` hold given settings, nested like RouterConfig and WorkerConfig; worker
    settings apply to both roles. `sections` come from a file, by the names in SECTIONS; the former have precedence."""

    panel = "Options"

    model: Path = Field(description="Model directory; default: the demo model.")
    also: tuple[str, ...] = Field(
        (),
        description="NAME=DIR: a model served beside the first, by as many workers of each role (--pool process).",
    )
    routers: int = Field(1, description="Routers; each takes the next ports.")
    prefill: int = Field(1, description="Prefill workers.")
    decode: int = Field(1, description="Decode workers.")
    prefill_tp: int = Field(1, description="Tensor-parallel ranks of a prefill worker.")
    decode_tp: int = Field(1, description="Tensor-parallel ranks of a decode worker.")
    pool: Literal["ray", "process"] = Field("ray", description="Workers on Ray, or as plain processes.")
    certs: Path | None = Field(None, description="TLS everywhere, with the files baton certs made there.")
    require_client_certs: bool = Field(False, description="Clients too must show a certificate.")
    autoscaling: Path | None = Field(
        None, description="YAML of the autoscaling policy: it sizes the pools (--pool ray)."
    )
    redis_url: str = Field(
        "",
        description="A Redis to use; default: an embedded one. Give one with a password by BATON_REDIS_URL: every user "
        "of this machine can read command lines.",
        json_schema_extra={"environment": "BATON_REDIS_URL"},
    )
    index_url: str = Field(
        "",
        description="A Redis of its own for the prefix index; default: it shares the other one. With a password, by "
        "BATON_INDEX_URL.",
        json_schema_extra={"environment": "BATON_INDEX_URL"},
    )
    state_file: Path | None = Field(None, description="Write ids, pids and addresses here (JSON).")
    namespace: str = no_flag("")
    router: Mapping[str, Any] = no_flag({})
    worker: Mapping[str, Any] = no_flag({})
    sections: Mapping[str, Any] = no_flag({})

    def __init__(self, model: Path, **given: Any):
        super().__init__(**{"model": model, **given})

    @model_validator(mode="after")
    def _can_start(self) -> Self:
        """Raises ConfigError."""
        check_place(self.model, "--model")
        for entry in self.also:
            name, _, directory = entry.partition("=")
            if not name or not directory:
                raise ConfigError(f"--also {entry}: write NAME=DIR, with a config.json in DIR", field="also")
            check_place(Path(directory), f"--also {name}=")
        for name in ("routers", "decode", "prefill_tp", "decode_tp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag_text(name)} must be at least 1", field=name)
        if self.prefill < 0:
            raise ConfigError("--prefill must be at least 0", field="prefill")
        for name, section in self.sections.items():
            if name not in SECTIONS or not isinstance(section, Mapping | None):
                raise ConfigError(
                    f"--config: {name} is not a section; write settings under {', '.join(SECTIONS)}",
                    field="config",
                )
            if section is not None and not isinstance(section.get("engine"), Mapping | None):
                raise ConfigError(f"--config: engine of {name} is not a section", field="config")
        if (draft := self._draft_model) is not None:
            check_draft_model(self.model, draft)
        self._check_settings()
        for url in (self.redis_url, self.index_url):
            if url:
                check_url(url)
        if self.autoscaling is not None and (self.pool != "ray" or self._local_prefill == "always"):
            raise ConfigError(
                "--autoscaling sizes two pools that Ray runs: use --pool ray, without --local-prefill always",
                field="autoscaling",
            )
        if self.pool == "ray" and len(self.models) > 1:
            raise ConfigError(
                "several models need --pool process: Ray's pools are of one model", field="pool"
            )
        if self.require_client_certs and self.certs is None:
            raise ConfigError("--require-client-certs needs --certs", field="certs")
        if self.prefill == 0 and self.autoscaling is None and self._local_prefill in ("never", "auto"):
            raise ConfigError(
                "--prefill 0 starts no worker that prefills, so nothing would be handed over: give at least 1, or say "
                "--local-prefill always (decode workers compute prompts) or fallback (they do until one joins)",
                field="prefill",
            )
        return self

    def _check_settings(self) -> None:
        """Check the settings with the models of the processes, and the memory, before any process starts."""
        model: type[RouterConfig] | type[WorkerConfig] = RouterConfig
        try:
            for index in {0, self.routers - 1}:  # the last one has the highest ports
                self.router_config(index)
            model = WorkerConfig
            for role in ROLES:
                for further in self.models:
                    self.worker_config(role, model=further)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            if problem["type"] == "extra_forbidden":
                kind = "of routers" if model is RouterConfig else "of workers"
                dotted = ".".join(map(str, problem["loc"]))
                raise ConfigError(
                    f"--config: {no_such_setting(model, problem['loc'])} ({kind})", field=dotted
                ) from None
            raise _as_config_error(problem["loc"], reason(problem, model)) from None

    @cached_property
    def _machine(self) -> memory.Machine:
        """Measured once, before the first process starts."""
        on_cpu = all(self._given_engine(role).get("device") == "cpu" for role in ROLES)
        routers = self.routers * self.router_config(0).processes
        set_aside = routers * memory.ROUTER_BYTES + (memory.RAY_BYTES if self.pool == "ray" else 0)
        return memory.Machine(limits(), [] if on_cpu else memory.cards(), set_aside)

    @property
    def _memory_pools(self) -> dict[Role, memory.PoolMemory]:
        workers, pools = self._most_workers, dict[Role, memory.PoolMemory]()
        for role in ROLES:
            engine = WorkerConfig.model_validate(self._settings(role)).engine
            pools[role] = memory.PoolMemory(
                workers[role],
                engine.tensor_parallel,
                engine.device,
                engine.memory_utilization,
                engine.kv_memory_bytes,
                engine.draft_kv_memory_bytes,
            )
        # Without a given size the KV pool of each worker takes what the draft model's pool leaves.
        if any(pool.kv_bytes for pool in pools.values()):
            pools["decode"] = pools["decode"]._replace(draft_bytes=self._draft_pool_bytes)
        return pools

    @cached_property
    def _draft_pool_bytes(self) -> int:
        return memory.draft_pool_bytes(WorkerConfig.model_validate(self._settings("decode")).engine)

    @property
    def _rank_bytes(self) -> dict[Role, int]:
        """The bytes that one rank may take. Raises ConfigError if they do not suffice."""
        pools, machine = self._memory_pools, self._machine
        memory.check_given(pools, machine)
        return memory.divide(pools, machine)

    @property
    def _local_prefill(self) -> str:
        return self.router_config(0).local_prefill

    @property
    def tls(self) -> LocalTls:
        return LocalTls(self.certs, self.require_client_certs)

    @property
    def prefill_workers(self) -> int:
        return 0 if self._local_prefill == "always" else self.prefill

    @property
    def policy(self) -> ServeAutoscalingConfig | None:
        """Read the autoscaling policy. Raises ConfigError."""
        return (
            None if self.autoscaling is None else sources.load(ServeAutoscalingConfig, {}, self.autoscaling)
        )

    @property
    def ray_cpus(self) -> int:
        """One logical CPU for each rank that may run at once."""
        workers = self._most_workers
        return workers["prefill"] * self.prefill_tp + workers["decode"] * self.decode_tp

    @property
    def _most_workers(self) -> dict[Role, int]:
        """Workers that may run at once."""
        if (policy := self.policy) is not None:
            return {"prefill": policy.prefill.max_replicas, "decode": policy.decode.max_replicas}
        count = Counter(role for role, _ in self.workers)
        return {role: count[role] for role in ROLES}

    @property
    def models(self) -> list[FurtherModel | None]:
        """The workers' models; None stands for the first one."""
        return [None, *self.router_config(0).models]

    @property
    def workers(self) -> list[tuple[Role, FurtherModel | None]]:
        """The workers to start, by role and model."""
        counts: dict[Role, int] = {"decode": self.decode, "prefill": self.prefill_workers}
        models = self.models
        return [(role, model) for role, count in counts.items() for model in models for _ in range(count)]

    def worker_config(
        self,
        role: Role,
        redis_url: str = "",
        namespace: str = "",
        secret: str = "",
        model: FurtherModel | None = None,
    ) -> WorkerConfig:
        """Settings of a worker. Raises pydantic.ValidationError, or ConfigError where memory does not suffice."""
        settings = self._settings(role) if model is None else _of_further(self._settings(role), model)
        memory_bytes = {"engine": {"memory_bytes": self._rank_bytes.get(role, 0)}}
        cluster = {"redis_url": redis_url, "namespace": namespace, "secret": secret}
        cluster["index_url"] = with_hash_tag(self.index_url, namespace) if redis_url else ""
        return WorkerConfig.model_validate(merged(memory_bytes, settings, cluster))

    def _settings(self, role: Role) -> dict[str, Any]:
        """Settings of a worker, without the memory that its ranks may take."""
        returns = role == "decode" and self.prefill_workers
        defaults = {
            "max_batch_tokens": BATCH_TOKENS[role],
            "recompute_limit_tokens": RECOMPUTE_LIMIT_TOKENS if returns else 0,
        }
        engine = {
            "model": self.model.absolute(),
            "tensor_parallel": self.prefill_tp if role == "prefill" else self.decode_tp,
        }
        if role == "decode" and self._draft_model is not None:
            engine["draft_model"] = self._draft_model
        fixed = {"role": role, **self.tls.worker(), "engine": engine}
        return merged({"engine": defaults}, self._given[role], fixed)

    @cached_property
    def _given(self) -> Mapping[Role, Mapping[str, Any]]:
        """The given settings of each role's workers."""
        shared = self._section("worker")
        return {
            "prefill": merged(without_drafts(shared), self._section("prefill"), without_drafts(self.worker)),
            "decode": merged(shared, self._section("decode"), self.worker),
        }

    def _section(self, name: str) -> Mapping[str, Any]:
        """One of SECTIONS; a file may name it and leave it empty."""
        section: Mapping[str, Any] = self.sections.get(name) or {}
        return section

    @property
    def _draft_model(self) -> Path | None:
        """The draft model of decode workers, as an absolute path."""
        given = self._given_engine("decode").get("draft_model")
        return Path(str(given)).absolute() if given is not None else None

    def _given_engine(self, role: Role) -> Mapping[str, Any]:
        engine: Mapping[str, Any] = self._given[role].get("engine") or {}
        return engine

    def router_config(
        self, index: int, redis_url: str = "", namespace: str = "", secret: str = ""
    ) -> RouterConfig:
        """The configuration of router `index`, which listens `index` ports above the first. Raises
        pydantic.ValidationError."""
        defaults = {
            "served_model_name": self.model.absolute().name,
            "drain_seconds": ROUTER_DRAIN_SECONDS,
            "http_port": RouterConfig.model_fields["http_port"].default,
            "grpc_port": RouterConfig.model_fields["grpc_port"].default,
        }
        given = merged(defaults, self._section("router"), self.router)
        ports = {name: given[name] for name in ("http_port", "grpc_port")}
        ports = {name: port + index for name, port in ports.items() if port and type(port) is int}
        fixed = {
            "redis_url": redis_url,
            "index_url": with_hash_tag(self.index_url, namespace) if redis_url else "",
            "namespace": namespace,
            "secret": secret,
            "model": self.model.absolute(),
            **self.tls.router(),
        }
        listed = given.get("models") or ()
        if isinstance(listed, list | tuple) and (further := self._further(listed)):
            fixed["models"] = further
        return RouterConfig.model_validate(merged(given, ports, fixed))

    def _further(self, listed: Sequence[Any]) -> list[Any]:
        """Entries of the models beside the first. Their workers have the context that is given for all, so routers are to
        know it."""
        given = (self._given_engine(role).get("max_model_len") for role in ROLES)
        length = min((one for one in given if type(one) is int and one > 0), default=0)
        entries = [*listed, *map(_named_model, self.also)]
        return [
            {**one, "max_model_len": length}
            if length and isinstance(one, Mapping) and not one.get("max_model_len")
            else one
            for one in entries
        ]

    def worker_environment(self) -> dict[str, str]:
        """Environment of workers. Passive waiting: busy-waiting workers on shared cores ran 40 times slower (measured)."""
        threads = max(self.worker_config(role).engine.threads for role in ROLES)
        return {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }


def _as_config_error(where: tuple[int | str, ...], reason: str) -> ConfigError:
    flag, dotted = _FLAGS.get(where), ".".join(map(str, where))
    section = any(path[: len(where)] == where for path in _FLAGS)  # the reason names its settings
    named = f"{flag_text(flag)}: " if flag else "" if section else f"--config: {dotted}: "
    return ConfigError(named + reason, field=flag or dotted)


def _named_model(entry: str) -> dict[str, Any]:
    """Read NAME=DIR."""
    name, _, directory = entry.partition("=")
    return {"name": name, "model": Path(directory).absolute()}


def _of_further(settings: Mapping[str, Any], model: FurtherModel) -> dict[str, Any]:
    """The settings of a further model's worker: the first one's, without its draft model and its adapters, and with a
    context of its own where its entry says so. Calls may load other adapters where their slots are set."""
    made = dict(without_drafts(settings))
    called = made.get("lora_dir") is not None and made["engine"].get("max_loras")
    left_out = ("lora",) if called else _ADAPTERS
    engine = {name: value for name, value in made["engine"].items() if name not in left_out}
    if model.max_model_len:
        engine["max_model_len"] = model.max_model_len
    if not called:
        made.pop("lora_dir", None)
    made["engine"] = {**engine, "model": model.model.absolute()}
    return {**made, "served_model_name": model.name}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings; later layers override earlier ones. A section that a file names but leaves empty is None, and
    overrides nothing."""
    made: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            below = made.get(name)
            if value is None and isinstance(below, Mapping):
                continue
            made[name] = (
                merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
            )
    return made


def without_secrets(config: WorkerConfig, directory: Path) -> dict[str, Any]:
    """Return the settings, each secret replaced by the name of a file that holds it (see `cluster.config.sources.load`).

    Raises OSError if they cannot be written, ConfigError if a Redis URL holds another secret than its password.
    """
    given = config.model_dump(mode="json", exclude={"worker_id"})
    given["redis_url"], password = split_password(config.redis_url)
    given["index_url"], index_password = split_password(config.index_url)
    secrets = {"secret": config.secret, "redis_password": password, "index_password": index_password}
    for name, content in secrets.items():
        if content:
            safe_files.replace(directory / name, content.encode())
            given |= {name: "", f"{name}_file": str(directory / name)}
    return given
