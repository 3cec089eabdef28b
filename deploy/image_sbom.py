"""Contents of an image, by the databases that it holds itself: Debian's packages (dpkg) and Python's (their metadata).

`document` is a CycloneDX 1.6 file; the same image gives the same bytes. Libraries inside wheels (UCX in NIXL's, OpenBLAS
in numpy's) are not components of their own: a wheel's licence names them, or its own SBOM does.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
# "GPL-3+ or LGPL-2+ with Autoconf exception". More words are a licence's text.
_NAME_WORDS = 7
# Of the classifiers that name no licence of their own.
_NO_LICENSE = {"OSI Approved"}
_NAMESPACE = uuid.UUID("6e6f0f6a-58a0-4d3e-9a0c-2f3f6f0f9f43")


@dataclass(frozen=True)
class Package:
    """`kind`: deb or pypi. `bytes`: of its files. `licenses`: as the package states them, SPDX where it does."""

    kind: str
    name: str
    version: str
    licenses: tuple[str, ...]
    bytes: int
    architecture: str = ""

    @property
    def purl(self) -> str:
        """https://github.com/package-url/purl-spec"""
        version = re.sub(r"[^A-Za-z0-9.~_-]", lambda found: f"%{ord(found[0]):02X}", self.version)
        if self.kind == "deb":
            return f"pkg:deb/debian/{self.name}@{version}?arch={self.architecture}"
        return f"pkg:pypi/{re.sub(r'[-_.]+', '-', self.name).lower()}@{version}"


def packages(root: Path) -> list[Package]:
    """All packages under `root`, an image's file system, by kind and name."""
    found = {(one.kind, one.name, one.version): one for one in (*_debian(root), *_python(root))}
    return [found[key] for key in sorted(found)]


def document(image: str, version: str, found: Sequence[Package]) -> dict[str, Any]:
    components = [_component(one) for one in found]
    serial = uuid.uuid5(_NAMESPACE, json.dumps([image, version, components], sort_keys=True))
    about = {"type": "container", "name": image, "version": version, "bom-ref": image}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": about},
        "components": components,
    }


def license_table(found: Sequence[Package]) -> str:
    """A line per package, with tabs: licences, kind, name, version."""
    lines = (f"{', '.join(one.licenses)}\t{one.kind}\t{one.name}\t{one.version}" for one in found)
    return "\n".join(sorted(lines)) + "\n"


def _component(package: Package) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "licenses": [{"license": {"name": one}} for one in package.licenses],
    }


def _debian(root: Path) -> Iterator[Package]:
    status = root / "var/lib/dpkg/status"
    for stanza in status.read_text().split("\n\n") if status.exists() else ():
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", stanza, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name = fields["Package"]
        size = int(fields.get("Installed-Size", 0)) * 1024
        licenses = _debian_licenses(root, name)
        yield Package("deb", name, fields["Version"], licenses, size, fields["Architecture"])


def _debian_licenses(root: Path, name: str) -> tuple[str, ...]:
    """The licences that its copyright file names, in its machine-readable form or by reference to common licences."""
    file = _inside(root, Path("usr/share/doc") / name / "copyright")
    if not file.is_file():
        return (UNKNOWN,)
    text = file.read_text(errors="replace")
    named = [
        one
        for one in re.findall(r"^License: *(\S.*)$", text, re.MULTILINE)
        if len(one.split()) <= _NAME_WORDS
    ]
    named = named or re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9])", text)
    return tuple(sorted({one.strip() for one in named})) or (f"see /usr/share/doc/{name}/copyright",)


def _inside(root: Path, path: Path) -> Path:
    """`path` under `root`, links followed as in the image."""
    at = root
    for part in path.parts:
        at = at / part
        for _ in range(8):
            if not at.is_symlink():
                break
            target = at.readlink()
            at = root / target.relative_to("/") if target.is_absolute() else at.parent / target
    return at


def _python(root: Path) -> Iterator[Package]:
    folders = [*root.glob("opt/baton/venv/lib/python3*/site-packages"), root / "opt/baton/code"]
    folders += [root / "usr/lib/python3/dist-packages", *root.glob("usr/local/lib/python3*/site-packages")]
    for one in distributions(path=[str(folder) for folder in folders if folder.is_dir()]):
        yield Package("pypi", one.metadata["Name"], one.version, _python_licenses(one), _bytes(one))


def _python_licenses(one: Distribution) -> tuple[str, ...]:
    """The SPDX expression; or else the classifiers; or else the first line of the free text."""
    if "License-Expression" in one.metadata:
        return (one.metadata["License-Expression"],)
    classifiers = one.metadata.get_all("Classifier") or ()
    named = {
        line.rpartition(" :: ")[2].strip() for line in classifiers if line.startswith("License :: ")
    } - _NO_LICENSE
    if named:
        return tuple(sorted(named))
    text = one.metadata["License"].strip() if "License" in one.metadata else ""
    return (text.splitlines()[0].strip(),) if text and text != "UNKNOWN" else (UNKNOWN,)


def _bytes(one: Distribution) -> int:
    """Bytes of the files that it installed and that are still there."""
    total = 0
    for file in one.files or ():
        try:
            total += os.lstat(str(one.locate_file(file))).st_size
        except OSError:  # trimmed
            continue
    return total
