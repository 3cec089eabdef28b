"""`python -m bench.peers --router`: the processor time of routers alone, in front of stub workers, in turns, in one run.

Every router gets the same requests over OpenAI's HTTP API, with streamed answers: many slow streams for the time of a
token, then short answers to prompts of 2,000 characters for the time of a request. Its stub workers have the protocol that
it needs: Baton's links, Dynamo's request plane, or HTTP. The routers differ in what they do: sglang-router passes text on,
the other two tokenise prompts and make text of tokens; only Baton's is one Python process. Each peer has an environment of
its own below out/peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.markdown import Markdown

from baton.processes.ports import free_ports
from bench.context import Context
from bench.probes.token_probe import PROMPT_CHARACTERS, REQUESTS_PER_SECOND, Counted, words
from bench.report import number
from tests.harness import router_process

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path("out/peers")
SGLANG = ("sglang-router==0.3.2",)
DYNAMO = ("ai_dynamo==1.6.1", "ai_dynamo_runtime==1.6.1")  # without their dependencies, which are engines
DYNAMO_NEEDS = (
    *(
        "pydantic<=2.13.5",
        "uvloop",
        "aiohttp",
        "kubernetes<33",
        "msgspec",
        "prometheus-client",
        "pyzmq",
        "redis",
    ),
    *("tqdm", "transformers", "zstandard", "fastapi", "pyyaml"),
)
START_SECONDS = 60.0
STREAMS, GAP = 200, 0.1  # of the streams whose tokens are counted
SECONDS = 6.0
AT_ONCE = 32  # connections that open together
WARM_UP = 100
TOKENS = 16  # of a short answer
PER_TOKEN, PER_REQUEST, TTFT = "µs per token", "µs per request", "TTFT p50, ms"


@dataclass(frozen=True)
class Running:
    """A router: its HTTP address, and the process whose time counts, with its children."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        router = psutil.Process(self.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (router, *router.children(recursive=True)))


Start = Callable[[Path, float], AbstractContextManager[Running]]  # out, seconds between two tokens
Measured = dict[str, dict[str, list[float]]]  # router → figure → value of each round


def main(context: Context, rounds: int) -> int:
    context.say("installing the peers, once")
    routers = _routers(context.model)
    measured: Measured = {name: {PER_TOKEN: [], PER_REQUEST: [], TTFT: []} for name in routers}
    for turn in range(1 if context.quick else rounds):
        for name, start in routers.items():
            context.say(f"round {turn + 1}: {name}")
            with start(context.out / "routers", GAP) as running:
                measured[name][PER_TOKEN].append(asyncio.run(_token(running, context.seconds(SECONDS))))
            with start(context.out / "routers", 0.0001) as running:
                request, ttft = asyncio.run(_request(running, context.seconds(SECONDS)))
            measured[name][PER_REQUEST].append(request)
            measured[name][TTFT].append(ttft)
    text = "\n".join(table(measured)) + "\n"
    context.out.mkdir(parents=True, exist_ok=True)
    (context.out / "routers.md").write_text(text)
    (context.out / "routers.json").write_text(json.dumps(measured, indent=1))
    context.console.print(Markdown(text))
    return 0


def table(measured: Measured) -> Iterator[str]:
    """Medians of the rounds, with the lowest and the highest."""
    yield "| | " + " | ".join(measured) + " |"
    yield "|---" + "|---:" * len(measured) + "|"
    for figure in (PER_TOKEN, PER_REQUEST, TTFT):
        cells = [
            f"{number(statistics.median(rows[figure]))} ({number(min(rows[figure]))}–{number(max(rows[figure]))})"
            for rows in measured.values()
        ]
        yield f"| {figure} | " + " | ".join(cells) + " |"


# --- what is sent ---------------------------------------------------------------------------------------------


async def _open(running: Running, prompt: str, tokens: int) -> Counted:
    host, _, port = running.url.rpartition("//")[2].rpartition(":")
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "stream": True}
    _, stream = await asyncio.get_running_loop().create_connection(
        lambda: Counted(json.dumps(body).encode()), host, int(port)
    )
    return stream


async def _token(running: Running, seconds: float) -> float:
    """Microseconds of the router's processors per token, while all streams run."""
    rng, streams = random.Random(1), list[Counted]()
    try:
        for begin in range(0, STREAMS, AT_ONCE):
            count = min(AT_ONCE, STREAMS - begin)
            tokens = int((seconds + START_SECONDS) / GAP)
            streams += await asyncio.gather(*(_open(running, words(rng, 100), tokens) for _ in range(count)))
        async with asyncio.timeout(START_SECONDS):
            await asyncio.gather(*(one.begun for one in streams))
        await asyncio.sleep(1.0)
        before, counted = running.cpu_seconds(), sum(one.events for one in streams)
        await asyncio.sleep(seconds)
        spent = running.cpu_seconds() - before
        count = sum(one.events for one in streams) - counted
        if not 0.5 < count / (STREAMS * seconds / GAP) < 1.5:
            raise RuntimeError(
                f"{count} tokens in {seconds:.0f} s of {STREAMS} streams: the figure means nothing"
            )
        return spent / count * 1e6
    finally:
        for one in streams:
            one.close()


async def _request(running: Running, seconds: float) -> tuple[float, float]:
    """Microseconds of the router's processors per request, and the median time to first token in milliseconds."""
    rng = random.Random(2)

    async def one() -> float:
        prompt, began = words(rng, PROMPT_CHARACTERS), time.perf_counter()
        stream = await _open(running, prompt, TOKENS)
        try:
            await asyncio.wait_for(stream.done, START_SECONDS)
        finally:
            stream.close()
        if stream.events < TOKENS:
            raise RuntimeError(f"{stream.events} events for {TOKENS} tokens")
        return stream.first - began

    for _ in range(WARM_UP):
        await one()
    before, tasks = running.cpu_seconds(), []
    for _ in range(int(seconds * REQUESTS_PER_SECOND)):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(1 / REQUESTS_PER_SECOND)
    ttft = await asyncio.gather(*tasks)
    return (running.cpu_seconds() - before) / len(ttft) * 1e6, statistics.median(ttft) * 1e3


# --- the routers ----------------------------------------------------------------------------------------------


def _routers(model: Path) -> dict[str, Start]:
    sglang, dynamo = (
        install(PEERS / "sglang-router", SGLANG),
        install(PEERS / "dynamo", DYNAMO_NEEDS, DYNAMO),
    )

    @contextlib.contextmanager
    def ours(out: Path, gap: float) -> Iterator[Running]:
        stubs = ("bench.probes.token_stubs", "--pairs", "1", "--gap", str(gap))
        with router_process.run(out / "baton", model, stubs) as bench:
            yield Running(bench.http, bench.pid)

    @contextlib.contextmanager
    def sglang_router(out: Path, gap: float) -> Iterator[Running]:
        stub = [sys.executable, "-m", "bench.probes.http_stub", "--gap", str(gap)]
        first = [*stub, "--most", "1"]
        with _process(first, out / "prefill") as prefill, _process(stub, out / "decode") as decode:
            port, metrics = free_ports(2)
            command = [str(sglang / "python"), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
            command += ["--prefill", _printed_address(prefill), "--decode", _printed_address(decode)]
            command += ["--policy", "cache_aware"]
            command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
            with _process([*command, "--log-level", "warn"], out / "sglang-router") as router:
                yield _ready(router, port)

    @contextlib.contextmanager
    def frontend(out: Path, gap: float) -> Iterator[Running]:
        (port,) = free_ports(1)
        store = out / "dynamo-files" / str(port)
        store.mkdir(parents=True, exist_ok=True)
        more = {"DYN_FILE_KV": str(store.absolute()), "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"}
        more |= {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_SELF_HOST_METADATA": "0"}
        stub = [str(dynamo / "python"), str(ROOT / "bench/probes/dynamo_stub.py"), "--model", str(model)]
        command = [str(dynamo / "python"), "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(port), "--router-mode", "kv", "--kv-cache-block-size", "16"]
        command += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        with (
            _process([*stub, "--gap", str(gap)], out / "dynamo-stub", more),
            _process(command, out / "dynamo", more) as router,
        ):
            yield _ready(router, port)

    return {"Baton": ours, "Dynamo frontend": frontend, "sglang-router": sglang_router}


def install(directory: Path, packages: Sequence[str], without_dependencies: Sequence[str] = ()) -> Path:
    """Make the environment once; return its bin directory."""
    binaries, done = directory.absolute() / "bin", directory / ".installed"
    if not done.exists():
        venv.create(directory, with_pip=True)
        pip = [str(binaries / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, *packages], check=True)
        if without_dependencies:
            subprocess.run([*pip, "--no-deps", *without_dependencies], check=True)
        done.touch()
    return binaries


@dataclass(frozen=True)
class Process:
    running: subprocess.Popen[bytes]
    log: Path

    def failed(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what}:\n{self.log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def _process(command: Sequence[str], out: Path, more: Mapping[str, str] | None = None) -> Iterator[Process]:
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(more or {})},
            start_new_session=True,
        )
    try:
        yield Process(process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


def _printed_address(stub: Process) -> str:
    """The address that a stub prints."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if (printed := stub.log.read_text()).endswith("\n"):
            return printed.strip()
        time.sleep(0.02)
    raise stub.failed("the stub did not start")


def _ready(router: Process, port: int) -> Running:
    """When it has answered a request."""
    url = f"http://127.0.0.1:{port}"
    body = json.dumps({"model": "bench", "prompt": "a b", "max_tokens": 1}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and router.running.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(asked, timeout=5):
            return Running(url, router.running.pid)
        time.sleep(0.2)
    raise router.failed("the router did not start")
