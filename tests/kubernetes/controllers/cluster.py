"""A cluster for tests: the API server with controllers, and pods that are ready at once.

with instant_cluster() as server:
    ...  # helm install --wait
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.controllers.instant import InstantKubelet, Outcome, usual
from tests.kubernetes.controllers.manager import Controllers


@contextlib.contextmanager
def instant_cluster(outcome: Outcome = usual) -> Iterator[ApiServer]:
    """Fails at the end if a controller was refused something."""
    with ApiServer() as server:
        kubelet = InstantKubelet(Client(server.objects_api), outcome)
        with Controllers(server.objects_api, kubelet) as controllers:
            yield server
        assert not controllers.problems, controllers.problems
