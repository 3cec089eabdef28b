"""`baton keys` makes API keys, `baton certs` certificates for a cluster of one's own."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from baton.cli.flags import Flags
from baton.cli.output import say
from cluster.config.base import flag_text
from cluster.config.reasons import reason
from cluster.errors import ConfigError
from cluster.security.keys import KeyEntry, new_key

MOST_DAYS = 36_500  # dates end with the year 9999
keys = typer.Typer(help="Make API keys.", no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """Make API keys."""


KEY = Flags(KeyEntry, without={"id", "tenant", "key_sha256", "expires_at", "revoked"})


@keys.command("new")
@KEY.add_to
def new(
    tenant: Annotated[str, typer.Option(help="Owner of the key.")],
    days: Annotated[
        int, typer.Option(min=0, max=MOST_DAYS, help="Valid for so many days; 0 = until revoked.")
    ] = 0,
    **flags: Any,
) -> None:
    """Print a new key, once, and the entry to add to the file that --api-keys-file names.

    Where a tenant has several keys, the limits are those of the key a request came with; what is used is counted
    together. The file may be changed while routers run.
    """
    given = KEY.values(KeyEntry, flags)
    # A limit of 0 is the default.
    fields = {name: value for name, value in given.items() if value or name == "weight"}
    if days:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        fields["expires_at"] = end.replace(microsecond=0)
    try:
        key, entry = new_key(tenant, **fields)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        named = "".join(f"{flag_text(str(part))}: " for part in problem["loc"][:1])
        field = ".".join(map(str, problem["loc"])) or "keys"
        raise ConfigError(
            f"no such key can be made: {named}{reason(problem, KeyEntry)}", field=field
        ) from None
    shown = entry.model_dump(mode="json", exclude_defaults=True)
    typer.echo(f"# The key of {tenant}. It is shown once: give it to its owner, and keep no copy.\n# {key}")
    typer.echo("# The entry for the keys file:")
    typer.echo(yaml.safe_dump([shown], sort_keys=False), nl=False)


def certs(
    out: Annotated[Path, typer.Option(help="Directory for certificates and keys.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address under which clients reach a router; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="How long certificates are valid.")] = 365,
) -> None:
    """Make a development authority and certificates; again in the same directory: renew them."""
    from baton.local.certs import make_certs

    for file in make_certs(out, host or [], days):
        say(f"{file}")
