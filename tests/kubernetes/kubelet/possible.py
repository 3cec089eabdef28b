"""Whether this machine allows pods made of processes: root, namespaces, an overlay and a bridge."""

from __future__ import annotations

import os
import subprocess
import tempfile

from tests.kubernetes.kubelet.network import Network

SECONDS = 20
# What a pod and a container begin with (sandbox.py, rootfs.py).
SCRIPT = """set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$0"
mkdir "$0/upper" "$0/work" "$0/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$0/upper,workdir=$0/work" "$0/root"
mount -t proc proc "$0/root/proc"
"""


def why_not() -> str:
    """Empty: they may."""
    if os.geteuid() != 0:
        return "pods as processes need root"
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "-m", "-n", "-i", "-u", "sh", "-c", SCRIPT, folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return f"no namespaces: {error}"
        if done.returncode:
            return f"no namespaces or no overlay: {done.stderr.strip()}"
    try:
        with Network():
            return ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"no bridge: {error}"
