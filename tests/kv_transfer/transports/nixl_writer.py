"""A process that writes into another's memory by NIXL; commands are JSON lines on standard input."""

from __future__ import annotations

import json
import sys
import time

from kv_transfer.memory import aligned_bytes
from kv_transfer.transports.nixl import NixlEndpoint, NixlWrite


def main() -> None:
    hello = json.loads(sys.stdin.readline())
    endpoint = NixlEndpoint("writer")
    source = aligned_bytes(hello["bytes"])
    source.fill_(hello["fill"])
    endpoint.register(source)
    endpoint.connect(hello["agent"], bytes.fromhex(hello["metadata"]))
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        write = endpoint.write(hello["agent"], [source[: command["bytes"]]], command["address"], 0, b"done")
        if command.get("release"):
            # What a "cancel" would do: let the handle go while the transfer may be in progress.
            assert isinstance(write, NixlWrite)
            write._agent.release_xfer_handle(write._handle)
            print("released", flush=True)
            continue
        deadline = time.monotonic() + command.get("seconds", 20)
        while (state := write.poll()) == "pending" and time.monotonic() < deadline:
            endpoint.arrivals()
        print(state, flush=True)


if __name__ == "__main__":
    main()
