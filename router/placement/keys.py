"""Redis keys of placement, in the order of the scripts' KEYS."""

from __future__ import annotations

from cluster.membership import keys


class PlacementKeys:
    def __init__(self, namespace: str, router_id: str):
        tag = f"{{{namespace}}}:"
        charges, answers = tag + "chg:" + router_id, tag + "answers:" + router_id
        self.load, self.calls, routers = tag + "load", tag + "calls", tag + "routers"
        self.place = [
            *(keys.slot_owners(namespace), self.load, routers, self.calls),
            *(charges, keys.drains(namespace), answers),
        ]
        self.settle = [self.load, routers, charges, answers, tag + "runs"]
