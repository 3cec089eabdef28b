"""Gives processes under test their orders for faults, and reads which ones were carried out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from cluster.faults.orders import InjectedFault, Order


def give_orders(directory: Path, orders: list[Order]) -> None:
    """Replace the earlier orders."""
    scratch = directory / "orders.json.part"
    scratch.write_text(json.dumps([asdict(order) for order in orders]))
    scratch.replace(directory / "orders.json")


def read_injected(directory: Path) -> list[InjectedFault]:
    path = directory / "injected.jsonl"
    if not path.exists():
        return []
    return [InjectedFault(**json.loads(line)) for line in path.read_text().splitlines()]
