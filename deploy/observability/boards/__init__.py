"""Contents of the dashboards: one module for each board."""

from __future__ import annotations

from deploy.observability.boards.engine import engine
from deploy.observability.boards.handoff import handoff
from deploy.observability.boards.models import models
from deploy.observability.boards.overview import overview
from deploy.observability.boards.parts import Board, Panel, Row
from deploy.observability.boards.placement import placement
from deploy.observability.boards.tenants import tenants

__all__ = ["Board", "Panel", "Row", "all_boards"]


def all_boards() -> list[Board]:
    return [overview(), models(), handoff(), placement(), engine(), tenants()]
