"""Whether this machine can build and run images: root, Debian's tools, and a kernel that lets them work."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

# debootstrap refuses to work without gpgv, which it only recommends.
TOOLS = ("buildah", "debootstrap", "gpgv", "podman", "runc")
# crun refuses a machine with both versions of cgroups; there may be no systemd.
PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
# As a pod of the chart: no root, no capabilities, nothing writable but /tmp. The limits are those of a machine that grants
# no higher ones.
CONFINED = (
    "--network", "host", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
    "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024",
)  # fmt: skip
_IMAGE = "localhost/baton-probe"
_STATIC = "/sbin/ldconfig"  # Debian's needs no library
_SECONDS = 120.0


def why_not() -> str:
    """Empty: it can. The same steps as of a build and a run, with one static program as the image."""
    if os.geteuid() != 0:
        return "building images needs root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    try:
        container = _run("buildah", "from", "scratch")
        try:
            _run("buildah", "add", container, _STATIC, "/program")
            _run("buildah", "run", "--isolation", "chroot", container, "--", "/program", "--version")
            _run("buildah", "commit", container, _IMAGE)
            _run(*PODMAN, "run", "--rm", *CONFINED, "--user", "10001:10001", _IMAGE, "/program", "--version")
        finally:
            _run("buildah", "rm", container)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no containers: {error}"
    except subprocess.CalledProcessError as error:
        return f"no containers: {' '.join(error.cmd[:6])} … said {error.stderr.strip()[-400:]}"
    return ""


def _run(*command: str) -> str:
    arguments: Sequence[str] = command
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=_SECONDS)
    return done.stdout.strip()
