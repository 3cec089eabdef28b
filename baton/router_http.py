"""Requests of the command line to a router's HTTP port."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from baton.client.routers import check_key
from cluster.errors import ConfigError, UnauthenticatedError, UnavailableError
from cluster.redis.urls import without_password
from cluster.security.tls import ClientTls
from loadgen.reach import LAST_PORT, UNTRUSTED

TIMEOUT_SECONDS = 5.0
# Keys are parts of OpenSSL's messages
_TLS_ADVICE = {
    "WRONG_VERSION_NUMBER": "this port does not use TLS: write http://, and leave --tls-ca out",
    "CERTIFICATE_VERIFY_FAILED": UNTRUSTED,
}


class RouterHttp:
    def __init__(self, url: str, api_key: str = "", tls: ClientTls | None = None):
        """`url` may leave out the scheme. `address` is for display: someone may give a URL that holds a password. Raises
        ConfigError."""
        self._url = (url if "//" in url else f"{'http' if tls is None else 'https'}://{url}").rstrip("/")
        has_secret = "@" in self._url or "password" in self._url  # of other malformed URLs all may be shown
        self.address = without_password(self._url) if has_secret else self._url
        headers = {"authorization": f"Bearer {api_key}"} if check_key(api_key) else {}
        verify = tls.context() if tls is not None else True
        # trust_env off: a proxy in the environment would get requests for routers on this machine
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False, headers=headers, verify=verify)

    def __enter__(self) -> RouterHttp:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str) -> bytes:
        """Return the body of a GET. Raises UnavailableError or UnauthenticatedError."""
        try:
            url = httpx.URL(f"{self._url}{path}")
            if (url.port or 0) > LAST_PORT:  # else the C library would take another one
                raise httpx.InvalidURL(f"ports end at {LAST_PORT}")
            answer = self._client.get(url)
        except httpx.RemoteProtocolError as error:
            raise UnavailableError(
                f"{self.address} does not serve HTTP ({error}): name a router's HTTP port (8000 by default), not its gRPC "
                f"port; with TLS, write https:// and give --tls-ca",
                field="url",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            for part, advice in _TLS_ADVICE.items():
                if part in str(error):
                    raise UnavailableError(f"{self.address}: {advice}", field="url") from error
            quotes = isinstance(error, httpx.InvalidURL) and self.address != self._url  # parts of the URL
            reason = "no valid URL" if quotes else error
            raise UnavailableError(
                f"no router answers at {self.address} ({reason}): `baton up` starts a cluster on this machine, --url "
                f"names another",
                field="url",
            ) from error
        if answer.status_code in (401, 403):
            raise UnauthenticatedError(
                f"{self.address} requires an admin's API key (--api-key)", field="api_key"
            )
        if answer.status_code != 200:
            raise UnavailableError(f"{self.address} answers with status {answer.status_code}", field="url")
        return answer.content

    def parsed(self, body: bytes) -> Mapping[str, Any]:
        """Return a view of the cluster. Raises ConfigError if it is none: something else answers at this address."""
        view = None
        with contextlib.suppress(orjson.JSONDecodeError):
            view = orjson.loads(body)
        if not isinstance(view, dict):
            raise self.no_router()
        return view

    def no_router(self) -> ConfigError:
        return ConfigError(
            f"{self.address} is no router of a Baton cluster: name a router's HTTP port (8000 by default), not a worker's "
            "port for metrics",
            field="url",
        )
