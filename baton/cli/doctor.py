"""`baton doctor`: looks at a Kubernetes cluster before an install."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from baton.cli.output import console
from cluster.errors import ConfigError
from cluster.redis.rights import Component

if TYPE_CHECKING:
    from rich.console import RenderableType

    from baton.doctor.checks import Check

EXIT_MISSING = 2


def doctor(
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Default: kubectl's, or the pod's service account.")
    ] = None,
    context: Annotated[str, typer.Option(help="Context of the kubeconfig.")] = "",
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Default: the context's or pod's.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    values_only: Annotated[bool, typer.Option("--values", help="Only the chart's values (YAML).")] = False,
    redis_url: Annotated[
        str,
        typer.Option(
            help="URL of an external Redis (externalRedis.url): checks its version, role, memory and policy."
        ),
    ] = "",
    redis_component: Annotated[
        Component | None,
        typer.Option(help="With --redis-url: check that its user has the rights of this component."),
    ] = None,
    redis_namespace: Annotated[
        str, typer.Option(help="With --redis-url: the prefix of the keys, the chart's is NAMESPACE-RELEASE.")
    ] = "baton",
    ray_address: Annotated[
        str, typer.Option(help="host:port of an existing Ray's head (its GCS): checks that it responds.")
    ] = "",
    without_permissions: Annotated[
        bool,
        typer.Option(
            "--without-permissions",
            help="Skip the check of what this account may create: a pod's account is not the one that installs.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each call of the API.")] = 10.0,
) -> None:
    """Check a Kubernetes cluster before an install, and print the chart's values that fit it.

    With --redis-url or --ray-address, and without a kubeconfig, only these are checked.

    Exit code 0: an install can work. 2: something is missing. 1: the cluster could not be asked.
    """
    from baton.doctor import report
    from baton.doctor.checks import judge
    from baton.doctor.reading import Reader, connect, default_namespace, names_cluster
    from baton.doctor.values import values_for

    if redis_component is not None and not redis_url:
        raise ConfigError("--redis-component needs --redis-url, with the user to check", field="redis_url")
    external = _external(redis_url, redis_namespace, redis_component, ray_address)
    if external and kubeconfig is None and not context and not values_only and not names_cluster():
        found, page = _without_cluster(external)
    else:
        with connect(kubeconfig, context) as api:
            reader = Reader(api, namespace or default_namespace(kubeconfig, context), timeout)
            facts = reader.read(permissions=not without_permissions)
        checks, values = [*judge(facts), *external], values_for(facts)
        found, page = report.as_json(facts, checks, values), report.render(facts, checks, values)
    _show(found, page, values_only=values_only, as_json=as_json)
    if not found["ok"]:
        raise typer.Exit(EXIT_MISSING)


def _without_cluster(external: list[Check]) -> tuple[dict[str, Any], RenderableType]:
    from baton.doctor import report
    from baton.doctor.checks import Check

    no_cluster = "no kubeconfig here, and this is no pod: name one with --kubeconfig for all checks"
    checks = [*external, Check("kubernetes", "info", "not checked", no_cluster)]
    return report.of_checks(checks), report.checks_table(checks)


def _show(found: dict[str, Any], page: RenderableType, *, values_only: bool, as_json: bool) -> None:
    from baton.doctor import report

    if values_only:
        console.file.write(report.as_yaml(found["values"]))
    elif as_json:
        console.file.write(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        console.print(page)


def _external(redis_url: str, namespace: str, component: Component | None, ray_address: str) -> list[Check]:
    """The checks of an external Redis and of an existing Ray's head, where they are named. Raises ConfigError."""
    from baton.doctor.ray_check import check_ray_head
    from baton.doctor.redis_check import check_redis, check_rights, check_server
    from cluster.redis.connect import check_url
    from cluster.redis.urls import with_hash_tag

    checks: list[Check] = []
    if redis_url:
        check_url(redis_url)
        tagged = with_hash_tag(redis_url, namespace)
        checks += [check_server(tagged, namespace), check_redis(tagged)]
        if component is not None:
            checks.append(check_rights(tagged, component, namespace))
    if ray_address:
        checks.append(check_ray_head(ray_address))
    return checks
