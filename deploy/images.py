"""`make images`: builds the images with Debian's buildah, without a daemon, and prints what each takes and holds.

python -m deploy.images [TARGET ...] [--base IMAGE] [--cpu-index URL] [--out FOLDER]

Without --base, a base image is made by debootstrap from the Debian mirror of this machine. Installing inside the build
uses this machine's pip settings and certificates, mounted for the build: no layer holds them. FOLDER gets images.json
(sizes), images.txt (the table that is printed), and for each image its SBOM (TARGET.cdx.json) and licences
(TARGET.licenses.txt).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy import image_probe, image_sbom
from deploy.image_sbom import Package
from deploy.versions import tag_of

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
SUITE = "bookworm"
BASE = f"localhost/baton-python:{SUITE}"
BASE_PACKAGES = ("python3", "python3-venv", "python-is-python3", "ca-certificates")
# What Debian's own images for containers have: no lists of packages, no documentation but licences.
SETTINGS: Mapping[str, str] = {
    "etc/apt/apt.conf.d/containers": 'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
    'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };\n',
    "etc/dpkg/dpkg.cfg.d/containers": "path-exclude /usr/share/doc/*\npath-include /usr/share/doc/*/copyright\n"
    "path-exclude /usr/share/man/*\npath-exclude /usr/share/locale/*\n",
}
# Security updates; then what was there before the settings.
UPGRADE = (
    "apt-get update && apt-get -y upgrade && apt-get clean && rm -rf /var/lib/apt/lists/* /var/log/*"
    " && rm -f /var/cache/apt/*.bin && find /usr/share/doc -type f ! -name copyright -delete"
    " && rm -rf /usr/share/man/* /usr/share/locale/*"
)
RECIPE = "org.baton.recipe"
APT_SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
# MB beyond the base image that a target may take
BUDGETS: Mapping[str, int] = {
    "router": 350,
    "worker": 1350,
    "prefill": 1600,
    "decode": 1600,
    "redis": 20,
    "rclone": 70,
}
CUDA = ("prefill-cuda", "decode-cuda")  # of the Dockerfile, but not built here
NAME = "localhost/baton"
OUT = ROOT / "out" / "images"
LARGEST = 8
_CERTIFICATES = Path("/etc/ssl/certs")
_SECONDS = 3600.0


@dataclass(frozen=True)
class Built:
    """An image. `bytes`: of all layers, unpacked; `seconds`: of the build."""

    target: str
    image: str
    bytes: int
    seconds: float
    packages: list[Package]

    @property
    def largest(self) -> dict[str, int]:
        """The packages that take most, with their bytes."""
        ordered = sorted(self.packages, key=lambda one: -one.bytes)
        return {one.name: one.bytes for one in ordered[:LARGEST]}


def main() -> int:
    given = arguments()
    console = Console()
    if given.if_possible and (reason := image_probe.why_not()):
        console.print(f"NO IMAGE IS BUILT HERE: {reason}", style="bold yellow")
        return 0
    try:
        base = pulled(given.base) if given.base else base_image(console)
        base_bytes = size_of(base)
        built = [build(target, base, given.cpu_index) for target in given.targets or BUDGETS]
    except subprocess.CalledProcessError as error:
        words = " ".join(error.cmd)
        console.print(f"exit code {error.returncode} of: {words}", style="red", highlight=False, markup=False)
        return 1
    shown = table(built, base_bytes)
    console.print(shown)
    write(given.out, built, base_bytes, shown)
    console.print(f"sizes, SBOMs and licences: {given.out}")
    over = [one.target for one in built if one.bytes - base_bytes > BUDGETS[one.target] * 10**6]
    if over:
        console.print(f"beyond the budget: {', '.join(over)}", style="red")
    return 1 if over else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(BUDGETS)}; default: all")
    parser.add_argument(
        "--base", default="", help="an image with Python 3.11 on Debian; default: made by debootstrap"
    )
    parser.add_argument(
        "--cpu-index", default=None,
        help="package index of torch's CPU build; empty: this machine's pip settings, which then must lead to that build; "
        "default: empty where they name a folder of wheels (find-links), else the Dockerfile's",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the reports; default: %(default)s")
    parser.add_argument(
        "--if-possible", action="store_true", help="where this machine cannot: print the reason, and succeed"
    )  # fmt: skip
    given = parser.parse_args()
    if cuda := [one for one in given.targets if one in CUDA]:
        parser.error(
            f"TARGET {cuda[0]} needs some GB of CUDA packages and is built by Docker: docker buildx build --file "
            f"deploy/docker/Dockerfile --target {cuda[0]} . (docs/kubernetes.md)"
        )
    if unknown := [one for one in given.targets if one not in BUDGETS]:
        parser.error(f"TARGET {unknown[0]} is none of {', '.join(BUDGETS)}")
    needed = () if given.if_possible else ("buildah", *([] if given.base else ["debootstrap"]))
    for program in needed:
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed: apt-get install {program}")
    return given


def pulled(base: str) -> str:
    """Get an image from its registry unless it is on this machine; returns its name."""
    run(["buildah", "pull", "--policy", "missing", base], shown=True)
    return base


def base_image(console: Console) -> str:
    """Make the base image unless there is one of this recipe; returns its name."""
    if _label(BASE) == recipe():
        return BASE
    console.print(f"making {BASE} by debootstrap")
    with tempfile.TemporaryDirectory(prefix="baton-base-") as folder:
        root = Path(folder) / "root"
        include = f"--include={','.join(BASE_PACKAGES)}"
        run(["debootstrap", "--variant=minbase", include, SUITE, str(root), mirror()])
        for path, text in {**SETTINGS, "etc/apt/sources.list": sources(mirror())}.items():
            (root / path).write_text(text)
        container = run(["buildah", "from", "scratch"]).strip()
        try:
            run(["buildah", "add", container, str(root), "/"])
            inside = ["buildah", "run", "--isolation", "chroot", "--network", "host", container, "--"]
            run([*inside, "sh", "-c", UPGRADE])
            run(["buildah", "config", "--label", f"{RECIPE}={recipe()}", container])
            run(["buildah", "commit", container, BASE])
        finally:
            run(["buildah", "rm", container])
    return BASE


def recipe() -> str:
    """Changes with what the base image is made from."""
    return hashlib.sha256(
        repr((SUITE, BASE_PACKAGES, SETTINGS, sources(mirror()), UPGRADE)).encode()
    ).hexdigest()[:16]


def sources(address: str) -> str:
    """The release with its security updates."""
    lines = (f"deb {address} {SUITE} main", f"deb {address} {SUITE}-updates main")
    return "\n".join((*lines, f"deb {address.rstrip('/')}-security {SUITE}-security main")) + "\n"


def _label(image: str) -> str:
    """The recipe of an image; empty without one, or without the image."""
    command = ["buildah", "inspect", "--type", "image", image]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    if found.returncode:
        return ""
    return str((json.loads(found.stdout)["OCIv1"]["config"].get("Labels") or {}).get(RECIPE, ""))


def mirror() -> str:
    """The Debian mirror that this machine uses; Debian's own where it uses none that debootstrap could."""
    for file in APT_SOURCES if platform.freedesktop_os_release().get("ID") == "debian" else ():
        for line in file.read_text().splitlines() if file.exists() else ():
            words = line.split()
            found = [word for word in words[1:] if word.startswith(("http://", "https://"))]
            if words[:1] in (["URIs:"], ["deb"]) and found:
                return found[0]
    return "http://deb.debian.org/debian"


def name_of(target: str) -> str:
    """The image's name as the chart has it, with image.registry and image.repository of NAME."""
    return f"{NAME}/{target}:{tag_of(target)}"


def build(target: str, base: str, cpu_index: str | None = None) -> Built:
    """Build one target of the Dockerfile. Raises subprocess.CalledProcessError."""
    began = time.monotonic()
    image = name_of(target)
    settings = pip_settings()
    if cpu_index is None and any(name.endswith("find-links") for name in settings):
        cpu_index = ""
    with tempfile.TemporaryDirectory(prefix="baton-pip-") as folder:
        command = ["buildah", "build", "--isolation", "chroot", "--network", "host", "--layers"]
        command += ["--target", target, "--build-arg", f"PYTHON_IMAGE={base}", "--tag", image]
        command += [] if cpu_index is None else ["--build-arg", f"CPU_INDEX={cpu_index}"]
        command += ["--ignorefile", f"{DOCKERFILE}.dockerignore", "--file", str(DOCKERFILE)]
        for source, place in mounts(Path(folder), settings):
            command += ["--volume", f"{source}:{place}:ro"]
        run([*command, str(ROOT)], shown=True)
    return Built(target, image, size_of(image), time.monotonic() - began, contents(image))


def pip_settings() -> dict[str, str]:
    """Settings of this machine's pip, of its environment too, by name (`global.index-url`, `:env:.find-links`)."""
    settings = {}
    for line in run([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        name, _, value = line.partition("=")
        settings[name] = value.strip("'\"").replace("\\n", "\n")
    return settings


def mounts(folder: Path, settings: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Mounts for pip inside the build: its settings as here, in one file in `folder`, and the files that they name."""
    lines, paths = ["[global]"], {_CERTIFICATES}
    for name, value in settings.items():
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


def contents(image: str) -> list[Package]:
    """The packages of an image."""
    container = run(["buildah", "from", "--pull-never", image]).strip()
    try:
        return image_sbom.packages(Path(run(["buildah", "mount", container]).strip()))
    finally:
        run(["buildah", "rm", container])


def table(built: Sequence[Built], base_bytes: int) -> Table:
    shown = Table(title=f"base {base_bytes / 1e6:.0f} MB", header_style="bold")
    for column in ("target", "MB", "beyond the base", "budget", "s", "packages", "largest packages, MB"):
        shown.add_column(column, justify="left" if column in ("target", "largest packages, MB") else "right")
    for one in built:
        parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in one.largest.items())
        sizes = (f"{one.bytes / 1e6:.0f}", f"{(one.bytes - base_bytes) / 1e6:.0f}", str(BUDGETS[one.target]))
        shown.add_row(one.target, *sizes, f"{one.seconds:.0f}", str(len(one.packages)), parts)
    return shown


def write(folder: Path, built: Sequence[Built], base_bytes: int, shown: Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [
        {"target": one.target, "image": one.image, "bytes": one.bytes, "beyond_base": one.bytes - base_bytes,
         "seconds": round(one.seconds, 1), "largest": one.largest}
        for one in built
    ]  # fmt: skip
    (folder / "images.json").write_text(json.dumps({"base": base_bytes, "images": sizes}, indent=1) + "\n")
    with (folder / "images.txt").open("w") as file:
        Console(file=file, width=160).print(shown)
    for one in built:
        name, _, version = one.image.rpartition(":")
        document = image_sbom.document(name, version, one.packages)
        (folder / f"{one.target}.cdx.json").write_text(json.dumps(document, indent=1) + "\n")
        (folder / f"{one.target}.licenses.txt").write_text(image_sbom.license_table(one.packages))


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
