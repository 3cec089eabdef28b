"""`python -m bench.carriers`: two carriers for a long-lived link between a router and a worker, with mutual TLS.

grpc     one bidirectional stream of `grpc.aio` per link, each on a connection of its own
frames   length-prefixed messages over `asyncio.Protocol` and `ssl`, on uvloop

One process writes as many workers would, another reads as a router would; both encode and decode the same protobuf
message. The frames per second are the same for both carriers and low enough that neither saturates. Reported: processor
time per frame of each process, over the whole process, and what links cost that carry beats alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import ssl
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton.local.certs import make_certs
from cluster.protocol.times import BEAT_SECONDS
from cluster.security.peer_names import WORKER_NAME

METHOD = "/baton.bench.Link/Open"
LENGTH = struct.Struct("<I")
FRAMES_PER_SECOND_AND_LINK = 40.0  # steps of a decode worker
MAX_FRAMES_PER_SECOND = 1500.0  # of all links together: below what the slower carrier saturates at
STREAMS = 256  # over all links, as many tokens a step


def _frame_class() -> Any:
    """Columns of one step: handles, choices, positions, token ids."""
    file = descriptor_pb2.FileDescriptorProto(name="bench/link.proto", package="baton.bench", syntax="proto3")
    message = file.message_type.add(name="Frame")
    for number, name in enumerate(("handle", "choice", "position", "token"), 1):
        message.field.add(
            name=name,
            number=number,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
            type=descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("baton.bench.Frame"))


Frame = _frame_class()


@dataclass(frozen=True)
class Load:
    carrier: str
    links: int
    frames_per_second: float  # of one link; 0: beats alone
    tokens: int  # a frame
    seconds: float


@dataclass(frozen=True)
class Figures:
    reader_us: float  # processor time per frame
    writer_us: float
    reader_share: float  # of a core
    frames: int
    received_share: float  # of the frames that were due


def encode(step: int, tokens: int) -> bytes:
    frame = Frame(
        handle=range(tokens),
        choice=[0] * tokens,
        position=[step] * tokens,
        token=[step * 7 % 50_000] * tokens,
    )
    return bytes(frame.SerializeToString())


class Count:
    """Numbers of frames and tokens that the reader has decoded."""

    def __init__(self) -> None:
        self.frames = 0
        self.tokens = 0

    def take(self, data: bytes) -> None:
        frame = Frame.FromString(data)
        self.frames += 1
        for _handle, _choice, _position, _token in zip(
            frame.handle, frame.choice, frame.position, frame.token, strict=True
        ):
            self.tokens += 1


# --- the writer: as many workers as there are links ------------------------------------------------------


async def write(load: Load, write_to: dict[int, Callable[[bytes], None]]) -> None:
    """A frame to each link in turn, evenly over time."""
    rate = load.frames_per_second or 1 / BEAT_SECONDS
    loop, step, due = asyncio.get_running_loop(), 0, 0.0
    began = loop.time()
    while True:
        for number, send in list(write_to.items()):
            due = began + (step + number / max(1, load.links)) / rate
            if (wait := due - loop.time()) > 0.0005:
                await asyncio.sleep(wait)
            send(encode(step, load.tokens) if load.frames_per_second else b"")
        step += 1
        await asyncio.sleep(0)


async def serve_grpc(load: Load, certs: Path, ready: Callable[[int], None]) -> None:
    links: dict[int, Callable[[bytes], None]] = {}

    async def open_link(_requests: Any, _context: Any) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        links[len(links)] = queue.put_nowait
        while True:
            yield await queue.get()

    handler = grpc.stream_stream_rpc_method_handler(open_link)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.bench.Link", {"Open": handler}),)
    )
    pair = ((certs / "worker.key").read_bytes(), (certs / "worker.pem").read_bytes())
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([pair], (certs / "ca.pem").read_bytes(), True)
    )
    await server.start()
    ready(port)
    while len(links) < load.links:
        await asyncio.sleep(0.05)
    await write(load, links)


async def serve_frames(load: Load, certs: Path, ready: Callable[[int], None]) -> None:
    links: dict[int, Callable[[bytes], None]] = {}

    class Link(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.Transport
            links[len(links)] = lambda data: transport.write(LENGTH.pack(len(data)) + data)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certs / "ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certs / "worker.pem", certs / "worker.key")
    server = await asyncio.get_running_loop().create_server(Link, "127.0.0.1", 0, ssl=context, backlog=1024)
    ready(server.sockets[0].getsockname()[1])
    while len(links) < load.links:
        await asyncio.sleep(0.05)
    await write(load, links)


def _writer(load: Load, certs: Path, pipe: Connection) -> None:
    async def run() -> None:
        serve = serve_grpc if load.carrier == "grpc" else serve_frames
        task = asyncio.create_task(serve(load, certs, pipe.send))
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        loop.add_reader(pipe.fileno(), asked.set)
        while not task.done():
            await asked.wait()
            if pipe.recv() == "end":
                os._exit(0)  # the loop's servers need no farewell
            pipe.send(time.process_time())
            asked.clear()
        await task

    uvloop.run(run())


# --- the reader: a router --------------------------------------------------------------------------------


async def read_grpc(port: int, links: int, certs: Path, count: Count) -> None:
    credentials = grpc.ssl_channel_credentials(
        (certs / "ca.pem").read_bytes(),
        (certs / "router.key").read_bytes(),
        (certs / "router.pem").read_bytes(),
    )
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.ssl_target_name_override", WORKER_NAME),
    ]

    async def one() -> None:
        channel: Any = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)
        call = channel.stream_stream(METHOD)()
        while isinstance(data := await call.read(), bytes):
            if data:
                count.take(data)
            else:
                count.frames += 1

    tasks = []
    for number in range(links):
        tasks.append(asyncio.create_task(one()))
        if number % 32 == 31:
            await asyncio.sleep(0.1)
    _KEPT.extend(tasks)


async def read_frames(port: int, links: int, certs: Path, count: Count) -> None:
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(certs / "ca.pem"))
    context.load_cert_chain(certs / "router.pem", certs / "router.key")

    class Link(asyncio.Protocol):
        def __init__(self) -> None:
            self._rest = b""

        def data_received(self, data: bytes) -> None:
            data, at = self._rest + data, 0
            while len(data) - at >= 4:
                end = at + 4 + LENGTH.unpack_from(data, at)[0]
                if end > len(data):
                    break
                if end - at > 4:
                    count.take(data[at + 4 : end])
                else:
                    count.frames += 1
                at = end
            self._rest = data[at:]

    loop = asyncio.get_running_loop()
    for _ in range(links):
        transport, _ = await loop.create_connection(
            Link, "127.0.0.1", port, ssl=context, server_hostname=WORKER_NAME
        )
        _KEPT.append(transport)


_KEPT: list[Any] = []  # of the reader's process, for its whole life


def _reader(load: Load, certs: Path, port: int, pipe: Connection) -> None:
    async def run() -> None:
        count = Count()
        await (read_grpc if load.carrier == "grpc" else read_frames)(port, load.links, certs, count)
        while count.frames < load.links:  # until each has begun
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        pipe.send("begin")
        frames, began, wall = count.frames, time.process_time(), time.monotonic()
        await asyncio.sleep(load.seconds)
        pipe.send((count.frames - frames, time.process_time() - began, time.monotonic() - wall))

    uvloop.run(run())
    os._exit(0)


def measure(load: Load, certs: Path) -> Figures:
    start = multiprocessing.get_context("spawn")
    to_writer, writer_end = start.Pipe()
    to_reader, reader_end = start.Pipe()
    writer = start.Process(target=_writer, args=(load, certs, writer_end))
    writer.start()
    reader = None
    try:
        port = _within(to_writer, 60.0)
        reader = start.Process(target=_reader, args=(load, certs, port, reader_end))
        reader.start()
        _within(to_reader, 180.0)
        to_writer.send("time")
        before = _within(to_writer, 60.0)
        frames, read, wall = _within(to_reader, load.seconds + 120.0)
        to_writer.send("time")
        written = _within(to_writer, 60.0) - before
        to_writer.send("end")
    finally:
        for process in (writer, reader):
            if process is not None:
                process.join(10.0)
                process.kill()
    due = load.links * (load.frames_per_second or 1 / BEAT_SECONDS) * wall
    return Figures(1e6 * read / frames, 1e6 * written / frames, read / wall, frames, frames / due)


def _within(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"the other process has sent nothing for {seconds:.0f} s")
    return pipe.recv()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.carriers", description=__doc__)
    parser.add_argument("--links", type=int, nargs="+", default=[1, 8, 64, 256, 1000])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default 5)")
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each, in turns (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    given = parser.parse_args()
    found: dict[tuple[int, bool, str], list[Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-carriers-") as made:
        certs = Path(made)
        make_certs(certs, [], 2)
        cases = [
            Load(
                carrier,
                links,
                0.0 if idle else min(FRAMES_PER_SECOND_AND_LINK, MAX_FRAMES_PER_SECOND / links),
                0 if idle else max(1, STREAMS // links),
                given.seconds,
            )
            for _ in range(given.pairs)
            for links in given.links
            for idle in (False, True)
            for carrier in ("grpc", "frames")
            if not idle or links == max(given.links)
        ]
        console = Console(stderr=True)
        for case in track(cases, "measuring", console=console, disable=not console.is_terminal):
            figures = measure(case, certs)
            found.setdefault((case.links, not case.frames_per_second, case.carrier), []).append(figures)
            print(case, figures, file=sys.stderr, flush=True)
    Console(width=110).print(table(found))
    if given.json:
        rows = [
            {"links": links, "idle": idle, "carrier": carrier, "runs": [vars(one) for one in runs]}
            for (links, idle, carrier), runs in found.items()
        ]
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


def table(found: dict[tuple[int, bool, str], list[Figures]]) -> Table:
    made = Table(
        "links", "tokens a frame", "reader µs/frame", "", "ratio", "writer µs/frame", "", "ratio",
        title="processor time, mutual TLS, medians (grpc.aio, frames)",
    )  # fmt: skip
    for links, idle in sorted({(links, idle) for links, idle, _ in found}):
        grpc_runs, frame_runs = found[links, idle, "grpc"], found[links, idle, "frames"]
        row = [str(links), "beats alone" if idle else str(max(1, STREAMS // links))]
        for of in ("reader_us", "writer_us"):
            a, b = (statistics.median(getattr(one, of) for one in runs) for runs in (grpc_runs, frame_runs))
            row += [f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}"]
        made.add_row(*row)
    return made


if __name__ == "__main__":
    sys.exit(main())
