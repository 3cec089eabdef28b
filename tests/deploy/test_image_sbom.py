"""The SBOM of an image: every package of dpkg and of Python, with its version and licences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import image_sbom
from deploy.image_sbom import UNKNOWN, Package

STATUS = """Package: redis-server
Status: install ok installed
Installed-Size: 150
Architecture: amd64
Version: 5:7.0.15-1~deb12u10
Description: server
 Version: 0 of the text

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: python3
Status: install ok installed
Installed-Size: 90
Architecture: amd64
Version: 3.11.2-1+b1

Package: bare
Status: install ok installed
Architecture: all
Version: 2
"""


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _distribution(folder: Path, name: str, *lines: str) -> None:
    text = "\n".join(("Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0+cpu", *lines)) + "\n"
    _file(folder / f"{name}-1.0.dist-info" / "METADATA", text)
    _file(folder / f"{name}-1.0.dist-info" / "RECORD", f"{name}.py,,\nremoved.py,,\n")
    _file(folder / f"{name}.py", "x" * 100)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image's file system."""
    _file(tmp_path / "var/lib/dpkg/status", STATUS)
    documents = tmp_path / "usr/share/doc"
    _file(
        documents / "redis-server/copyright",
        "Format: x\n\nFiles: *\nLicense: BSD-3-clause\n\nLicense: Expat\n",
    )
    _file(documents / "python3.11/copyright", "in `/usr/share/common-licenses/GPL-2'.\n")
    (documents / "python3").symlink_to("/usr/share/doc/python3.11")
    packages = tmp_path / "opt/baton/venv/lib/python3.11/site-packages"
    _distribution(packages, "a_b", "License-Expression: Apache-2.0 WITH LLVM-exception", "License: text")
    _distribution(
        packages, "c", "Classifier: License :: OSI Approved", "Classifier: License :: OSI Approved :: MIT"
    )
    _distribution(packages, "d", "License: BSD 3-Clause")
    _distribution(tmp_path / "opt/baton/code", "e")
    return tmp_path


def test_packages_have_versions_and_licences_and_sizes(root: Path) -> None:
    assert image_sbom.packages(root) == [
        Package("deb", "bare", "2", (UNKNOWN,), 0, "all"),
        Package("deb", "python3", "3.11.2-1+b1", ("GPL-2",), 90 * 1024, "amd64"),
        Package("deb", "redis-server", "5:7.0.15-1~deb12u10", ("BSD-3-clause", "Expat"), 150 * 1024, "amd64"),
        Package("pypi", "a_b", "1.0+cpu", ("Apache-2.0 WITH LLVM-exception",), 100),
        Package("pypi", "c", "1.0+cpu", ("MIT",), 100),
        Package("pypi", "d", "1.0+cpu", ("BSD 3-Clause",), 100),
        Package("pypi", "e", "1.0+cpu", (UNKNOWN,), 100),
    ]


def test_the_document_is_cyclonedx_and_the_same_for_the_same_image(root: Path) -> None:
    document = image_sbom.document("localhost/baton/redis", "1", image_sbom.packages(root))
    assert document == image_sbom.document("localhost/baton/redis", "1", image_sbom.packages(root))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    purls = {one["bom-ref"]: one["licenses"] for one in document["components"]}
    assert len(purls) == 7
    assert "pkg:pypi/a-b@1.0%2Bcpu" in purls
    redis = purls["pkg:deb/debian/redis-server@5%3A7.0.15-1~deb12u10?arch=amd64"]
    assert redis == [{"license": {"name": "BSD-3-clause"}}, {"license": {"name": "Expat"}}]
    other = image_sbom.document("localhost/baton/redis", "2", image_sbom.packages(root))
    assert other["serialNumber"] != document["serialNumber"]
    json.dumps(document)
