"""Redis keys of placement, in the order of the scripts' KEYS."""

from __future__ import annotations

from cluster.membership import keys


class PlacementKeys:
    def __init__(self, namespace: str, router_id: str):
        tag = f"{{{namespace}}}:"
        self._tag, self._router_id = tag, router_id
        self._owners, self._drains = keys.slot_owners(namespace), keys.drains(namespace)
        self._facts, self._leases = keys.facts(namespace), keys.leases(namespace)
        self.load, self.calls = keys.load(namespace), tag + "calls"
        self._routers, self._answers = tag + "routers", tag + "answers:" + router_id

    def charges(self, run: int | str) -> str:
        """The table of the charges of one run of this router."""
        return f"{self._tag}chg:{self._router_id}:{run}"

    @property
    def all_charges(self) -> str:
        """ACL pattern of the tables of all routers; earlier versions named theirs without a run."""
        return f"{self._tag}chg:*"

    def place(self, run: int | str) -> list[str]:
        return [
            *(self._owners, self.load, self._routers, self.calls),
            *(self.charges(run), self._drains, self._answers, self._facts, self._leases),
        ]

    def scores(self, group: bytes, kind: str) -> str:
        """The sorted set `kind` of a KV group (cluster/membership/sets.lua)."""
        return f"{self._tag}set:{group.decode()}:{kind}"

    def settle(self, run: int | str) -> list[str]:
        return [self.load, self._routers, self.charges(run), self._answers, self._tag + "runs"]
