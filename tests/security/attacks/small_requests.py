"""Small requests of one key, back to back on many connections. Prints `begun`, and at the end how many were answered, by
status, as JSON. Run as a process of its own with the lowest priority: an attacker's computing happens on machines of his
own."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter

import grpc

from wire import inference_pb2 as pb

BODY = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()


class SmallRequests:
    def __init__(self, address: str, key: str, connections: int, seconds: float):
        self.address = address
        self.key = key
        self.connections = connections
        self.ends = time.monotonic() + seconds
        self.answers: Counter[str] = Counter()

    async def run(self, *, over_grpc: bool) -> Counter[str]:
        one = self._grpc if over_grpc else self._http
        tasks = [asyncio.create_task(one()) for _ in range(self.connections)]
        await asyncio.wait(tasks, timeout=max(0.0, self.ends - time.monotonic()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.answers

    def _answered(self, status: str) -> None:
        if not self.answers:
            print("begun", flush=True)
        self.answers[status] += 1

    async def _http(self) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        request = f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.monotonic() < self.ends:
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answer.split(b"content-length: ")[1].split(b"\r\n")[0]))
            self._answered(answer[9:12].decode())
        writer.close()

    async def _grpc(self) -> None:
        message = pb.GenerateRequest(text="abc", options=pb.GenerateOptions(max_tokens=2)).SerializeToString()
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(self.address, options=options) as channel:
            generate = channel.unary_stream("/baton.v1.Inference/Generate", bytes, bytes)
            while time.monotonic() < self.ends:
                call = generate(message, metadata=(("authorization", f"Bearer {self.key}"),))
                self._answered((await call.code()).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("key")
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    os.nice(19)
    attack = SmallRequests(given.address, given.key, given.connections, given.seconds)
    print(json.dumps(asyncio.run(attack.run(over_grpc=given.grpc))))


if __name__ == "__main__":
    main()
