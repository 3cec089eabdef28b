"""`make images`: builds the images with Debian's buildah, without a daemon, and prints what each takes.

python -m deploy.images [TARGET ...] [--base IMAGE]

Without --base, a base image is made by debootstrap from the Debian mirror of this machine. Installing inside the build
uses this machine's pip settings and certificates, mounted for the build: no layer holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import baton

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
SUITE = "bookworm"
BASE = f"localhost/baton-python:{SUITE}"
BASE_PACKAGES = ("python3", "python3-venv", "python-is-python3", "ca-certificates")
# MB beyond the base image that a target may take
BUDGETS: Mapping[str, int] = {"router": 350, "prefill": 1600, "decode": 1600}
NAME = "localhost/baton"
_CERTIFICATES = Path("/etc/ssl/certs")
_SECONDS = 3600.0


@dataclass(frozen=True)
class Built:
    """An image. `bytes`: of all layers, unpacked; `largest`: its largest packages, with their bytes."""

    target: str
    image: str
    bytes: int
    seconds: float
    largest: dict[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(BUDGETS)}; default: all")
    parser.add_argument(
        "--base", default="", help="an image with Python 3.11 on Debian; default: made by debootstrap"
    )
    parser.add_argument("--report", type=Path, help="write sizes to this file (JSON)")
    given = parser.parse_args()
    targets = given.targets or list(BUDGETS)
    if unknown := [one for one in targets if one not in BUDGETS]:
        parser.error(f"TARGET {unknown[0]} is none of {', '.join(BUDGETS)}")
    for program in ("buildah", *([] if given.base else ["debootstrap"])):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed: apt-get install {program}")
    console = Console()
    base = given.base or base_image(console)
    base_bytes = size_of(base)
    built = [build(target, base) for target in targets]
    show(built, base_bytes, console)
    if given.report is not None:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        images = [asdict(one) | {"beyond_base": one.bytes - base_bytes} for one in built]
        given.report.write_text(json.dumps({"base": base_bytes, "images": images}, indent=1))
    over = [one.target for one in built if one.bytes - base_bytes > BUDGETS[one.target] * 10**6]
    if over:
        console.print(f"beyond the budget: {', '.join(over)}", style="red")
    return 1 if over else 0


def base_image(console: Console) -> str:
    """Make the base image unless there is one; returns its name."""
    if (
        subprocess.run(
            ["buildah", "inspect", "--type", "image", BASE], capture_output=True, check=False
        ).returncode
        == 0
    ):
        return BASE
    console.print(f"making {BASE} by debootstrap")
    with tempfile.TemporaryDirectory(prefix="baton-base-") as folder:
        root = Path(folder) / "root"
        command = [
            "debootstrap",
            "--variant=minbase",
            f"--include={','.join(BASE_PACKAGES)}",
            SUITE,
            str(root),
            mirror(),
        ]
        run(command)
        for left in (
            "var/cache/apt/archives",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            shutil.rmtree(root / left, ignore_errors=True)
            (root / left).mkdir(parents=True)
        container = run(["buildah", "from", "scratch"]).strip()
        try:
            run(["buildah", "add", container, str(root), "/"])
            run(["buildah", "commit", container, BASE])
        finally:
            run(["buildah", "rm", container])
    return BASE


def mirror() -> str:
    """The Debian mirror that this machine uses."""
    for file in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        for line in file.read_text().splitlines() if file.exists() else ():
            words = line.split()
            if words[:1] == ["URIs:"] and len(words) > 1:
                return words[1]
            if words[:1] == ["deb"] and "://" in line:
                return next(word for word in words if "://" in word)
    return "http://deb.debian.org/debian"


def build(target: str, base: str) -> Built:
    """Build one target of the Dockerfile. Raises subprocess.CalledProcessError."""
    began = time.monotonic()
    image = f"{NAME}/{target}:{baton.__version__}"
    with tempfile.TemporaryDirectory(prefix="baton-pip-") as folder:
        command = ["buildah", "build", "--isolation", "chroot", "--network", "host", "--layers"]
        command += ["--target", target]
        command += ["--build-arg", f"PYTHON_IMAGE={base}", "--build-arg", "CPU_INDEX=", "--tag", image]
        command += ["--ignorefile", f"{DOCKERFILE}.dockerignore", "--file", str(DOCKERFILE)]
        for source, place in mounts(Path(folder)):
            command += ["--volume", f"{source}:{place}:ro"]
        run([*command, str(ROOT)], shown=True)
    return Built(target, image, size_of(image), time.monotonic() - began, largest_parts(image))


def mounts(folder: Path) -> Iterator[tuple[Path, str]]:
    """What pip needs inside the build as it does here: its settings, in one file in `folder`, and what they name."""
    settings = run([sys.executable, "-m", "pip", "config", "list"])
    lines, paths = ["[global]"], {_CERTIFICATES}
    for line in settings.splitlines():
        name, _, value = line.partition("=")
        value = value.strip("'\"").replace("\\n", "\n")
        key = name.rpartition(".")[2]
        if key in ("cert", "client-cert"):
            paths.add(Path(value).parent)
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists() and key != "cert":
                # An index of files (…/simple) leads to the folders beside it.
                paths.add(path.parent if "index-url" in key else path)
        lines.append(f"{key} = " + "\n    ".join(value.split("\n")))
    file = folder / "pip.conf"
    file.write_text("\n".join(dict.fromkeys(lines)) + "\n")
    yield file, "/etc/pip.conf"
    for path in sorted(paths):
        yield path, str(path)


def size_of(image: str) -> int:
    """Bytes of all layers, unpacked."""
    found = json.loads(run(["buildah", "images", "--json", image]))
    return int(found[0].get("sizeInBytes") or _bytes(found[0]["size"]))


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * float(1000 ** ["B", "KB", "MB", "GB"].index(unit.upper()))


def largest_parts(image: str, count: int = 8) -> dict[str, int]:
    """The installed packages that take most, with their bytes."""
    container = run(["buildah", "from", "--pull-never", image]).strip()
    try:
        root = Path(run(["buildah", "mount", container]).strip())
        packages = next(root.glob("opt/baton/venv/lib/python3*/site-packages"))
        sizes = {one.name: _tree_bytes(one) for one in packages.iterdir() if one.is_dir()}
        return dict(sorted(sizes.items(), key=lambda item: -item[1])[:count])
    finally:
        run(["buildah", "rm", container])


def _tree_bytes(folder: Path) -> int:
    return sum((Path(where) / name).lstat().st_size for where, _, names in os.walk(folder) for name in names)


def show(built: Sequence[Built], base_bytes: int, console: Console) -> None:
    table = Table(title=f"base {base_bytes / 1e6:.0f} MB", header_style="bold")
    for column in ("target", "MB", "beyond the base", "budget", "s", "largest packages, MB"):
        table.add_column(column, justify="left" if column in ("target", "largest packages, MB") else "right")
    for one in built:
        parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in one.largest.items())
        sizes = (f"{one.bytes / 1e6:.0f}", f"{(one.bytes - base_bytes) / 1e6:.0f}")
        table.add_row(one.target, *sizes, str(BUDGETS[one.target]), f"{one.seconds:.0f}", parts)
    console.print(table)


def run(command: list[str], *, shown: bool = False) -> str:
    """Raises subprocess.CalledProcessError; what the command said is printed then."""
    done = subprocess.run(
        command, stdout=None if shown else subprocess.PIPE, stderr=subprocess.STDOUT if not shown else None,
        text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write((done.stdout or "")[-4000:])
        done.check_returncode()
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
