"""`make screenshots`: the pictures of docs/screens.md, taken of a real cluster with the demo model under load.

The page by a browser, in both colour schemes; `baton top` drawn by rich as SVG, which the browser makes a picture of.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from baton.router_http import RouterHttp
from baton.top.feed import FeedSnapshot, ask
from baton.top.frame import frame
from loadgen.config import LoadConfig
from loadgen.load import run_all
from tests.end_to_end.conftest import run_cluster
from tests.harness.cluster import Cluster
from tests.system.ui.chromium import Browser, Page, open_browser
from tests.system.ui.conftest import DEMO_MODEL, ROOT

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 300 << 10
LOAD_SECONDS = 150.0
BEFORE_SECONDS = 110.0  # of load, so that the charts show something
WIDTH, HEIGHT = 1360, 900
PHONE_WIDTH = 390
COLUMNS = 132
ANSWER_SECONDS = 60.0
# Each chart is drawn at the width of its card, and again with the next update of the cluster view.
DRAWN = """[...document.querySelectorAll('.chart svg, #topology > svg')].every(
    (picture) => picture.viewBox.baseVal.width === Math.max(200, picture.parentElement.clientWidth))"""
FLAGS = ["--pool", "process", "--routers", "2", "--prefill", "2", "--decode", "3"]
FLAGS += ["--kv-memory", "16MiB", "--local-prefill", "fallback", "--served-model-name", "baton-demo"]
QUESTIONS = (
    "Write a Python function `read_lines`: read a file and return its lines.",
    "What does `os.path.join` do?",
    "Write a Python function `is_prime`.",
    "Write a class `Counter` that counts words.",
)
PALETTE = TerminalTheme(
    (31, 33, 36),
    (236, 235, 232),
    [
        (31, 33, 36),
        (240, 118, 108),
        (99, 185, 138),
        (227, 176, 75),
        (106, 165, 238),
        (200, 150, 220),
        (106, 165, 238),
        (236, 235, 232),
    ],
)
# The font that rich would fetch from the network.
REMOTE_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)


def load(cluster: Cluster) -> threading.Thread:
    """Conversations through both routers, in the background."""
    configs = [
        LoadConfig(
            protocol="grpc",
            targets=(address,),
            seed=seed,
            concurrency=2,
            seconds=LOAD_SECONDS,
            warmup_requests=0,
            workload="conversation",
            questions=QUESTIONS,
            turns=5,
            think_seconds=0.5,
            max_tokens=96,
            temperature=0.6,
        )
        for seed, address in enumerate(cluster.routers)
    ]
    quiet = Console(file=io.StringIO())
    thread = threading.Thread(target=lambda: asyncio.run(run_all(configs, console=quiet)))
    thread.start()
    return thread


def shoot_page(browser: Browser, url: str) -> None:
    page = Page(browser, width=WIDTH, height=HEIGHT)
    page.open(f"{url}/ui")
    page.wait("document.querySelector('#state').innerText === 'live'", "live figures")
    page.run("document.querySelector('#max-tokens').value = '90'")
    page.type("#question", QUESTIONS[2], enter=True)
    page.wait("document.querySelector('.waterfall')", "the answer", ANSWER_SECONDS)
    page.run("document.activeElement.blur()")
    for name, dark in (("ui-light", False), ("ui-dark", True)):
        page.media(dark=dark)
        page.screenshot(IMAGES / f"{name}.png")
    page.media()
    page.resize(PHONE_WIDTH, HEIGHT)
    page.wait(f"document.querySelector('#topology').clientWidth < {PHONE_WIDTH}", "it is narrow")
    page.wait(DRAWN, "the pictures are drawn for this width")
    page.screenshot(IMAGES / "ui-phone.png", whole=False)
    if page.complaints:
        raise SystemExit(f"the page complains: {page.complaints}")
    page.close()


def shoot_top(browser: Browser, url: str, directory: Path) -> None:
    with RouterHttp(url) as router:
        look = FeedSnapshot(router.address, ask(router))
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(frame(look, width=COLUMNS))
    drawn = console.export_svg(title="baton top", theme=PALETTE)
    drawn = REMOTE_FONT.sub("", drawn).replace("Fira Code", "DejaVu Sans Mono")
    file = directory / "top.html"
    file.write_text(f"<!doctype html><meta charset='utf-8'><style>body {{ margin: 0 }}</style>{drawn}")
    page = Page(browser, width=WIDTH, height=HEIGHT)
    page.open(file.as_uri())
    height = page.run("Math.ceil(document.querySelector('svg').getBoundingClientRect().height)")
    page.resize(WIDTH, height)
    page.screenshot(IMAGES / "top.png")
    page.close()


def main() -> int:
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        run_cluster(Path(scratch) / "c", DEMO_MODEL, *FLAGS) as cluster,
    ):
        working = load(cluster)
        try:
            with open_browser(Path(scratch) / "browser") as browser:
                time.sleep(BEFORE_SECONDS)
                shoot_page(browser, cluster.http)
                shoot_top(browser, cluster.http, Path(scratch))
        finally:
            working.join()
    sizes = {file.name: file.stat().st_size for file in sorted(IMAGES.glob("*.png"))}
    print(json.dumps(sizes))
    return 1 if max(sizes.values()) > MAX_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
