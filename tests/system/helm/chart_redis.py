"""The chart's Redis as a process: the container's own command line, run by Debian's server (Redis 7)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import redis

from cluster.redis.connect import connect
from tests.harness.redis_servers import find_server
from tests.harness.waiting import wait_for
from tests.system.helm.rendering import Renderer, ValueSet, pods_of

NAMESPACE = "serving-t"  # as tests.system.helm.rendering names namespace and release
USERS = ("router", "worker", "autoscaler")


@dataclass(frozen=True)
class ChartRedis:
    """`urls` by user; `admin` is a user that the chart does not have, for what a test looks up."""

    urls: Mapping[str, str]
    admin: str
    passwords: Mapping[str, str]
    pid: int

    def as_user(self, user: str) -> redis.Redis:
        return connect(self.urls[user])

    def refusals(self) -> list[Mapping[str, object]]:
        """What Redis has refused to any user since `forget_refusals`."""
        with connect(self.admin) as client:
            return list(client.acl_log())

    def forget_refusals(self) -> None:
        with connect(self.admin) as client:
            client.acl_log_reset()


@contextlib.contextmanager
def run_chart_redis(renderer: Renderer, directory: Path) -> Iterator[ChartRedis]:
    directory.mkdir(parents=True, exist_ok=True)
    server, environment = find_server()
    program = directory / "redis-server"
    program.symlink_to(server)  # it is redis-server by its name
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = int(one.getsockname()[1])
    passwords = {user: f"{user}-{secrets.token_hex(8)}" for user in (*USERS, "ray", "admin")}
    admin = ["--user", "admin", "on", f">{passwords['admin']}", "~*", "&*", "+@all"]
    values = {
        "autoscaling": {"enabled": True},
        "redis": {"port": port, "command": [str(program), *admin]},
    }
    (pod,) = [one for one in pods_of(renderer.render(ValueSet(values=values))) if one.component == "redis"]
    (container,) = pod.containers
    here = {"$(POD_IP)": "127.0.0.1", "/data": str(directory)}
    words = [here.get(word, word) for word in (*container["command"], *container["args"])]
    told = {f"REDIS_{user.upper()}_PASSWORD": passwords[user] for user in USERS}
    told["RAY_REDIS_PASSWORD"] = passwords["ray"]
    urls = {user: f"redis://{user}:{passwords[user]}@127.0.0.1:{port}/0" for user in passwords}
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(
            words, env={**os.environ, **environment, **told}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: _answers(urls["admin"]), 30, "redis answers")
        yield ChartRedis(urls, urls["admin"], passwords, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(url: str) -> bool:
    with connect(url) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False
