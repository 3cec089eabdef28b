"""An endpoint whose every request asks for one answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.serving import Admit, ParsedRequest, Serving
from router.observe.traces import Arrival


class CreatingEndpoint(ABC):
    def __init__(self, serving: Serving):
        self._serving = serving
        self._gateway = serving.gateway

    async def create(self, request: Exchange) -> None:
        await self._serving.serve(request, self._read)

    @abstractmethod
    async def _read(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest: ...
