"""The script that turns a fresh mount namespace into a container's file system and becomes its command.

The root is an overlay over this machine's: whatever is mounted into it, or written where a container may write, is
gone with the namespace. Runs as root until the last line.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Identity:
    """The user that the command runs as; 0 is root."""

    user: int = 0
    group: int = 0
    groups: tuple[int, ...] = ()
    no_new_privileges: bool = False
    capabilities_dropped: bool = False
    capabilities_added: tuple[str, ...] = ()  # by a real runtime only

    def command(self) -> list[str]:
        flags = [f"--reuid={self.user}", f"--regid={self.group}"]
        flags += [f"--groups={','.join(map(str, self.groups))}"] if self.groups else ["--clear-groups"]
        flags += ["--no-new-privs"] if self.no_new_privileges else []
        flags += ["--inh-caps=-all", "--bounding-set=-all"] if self.capabilities_dropped else []
        return ["setpriv", *flags]


@dataclass(frozen=True)
class RootFs:
    """
    Args:
        scratch: an empty folder, mounted over.
        visible: folders that are there at their own places, read-only.
        mounts: volumes and files, in the order in which they are mounted.
    """

    scratch: Path
    visible: Sequence[Path]
    mounts: Sequence[Mount]
    read_only: bool

    def script(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        identity: Identity,
        directory: str,
        made: Path,
    ) -> str:
        """A shell script that makes the root and runs the command in it. It creates the file `made` in between."""
        here = shlex.quote(str(self.scratch))
        lines = [
            "set -e",
            "mount --make-rprivate /",
            f"mount -t tmpfs tmpfs {here}",
            f"mkdir {here}/upper {here}/work {here}/root",
            f"chmod 755 {here}/upper",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={here}/upper,workdir={here}/work {here}/root",
            f"mount -t proc proc {here}/root/proc",
            f"mount --rbind /dev {here}/root/dev",
            f"mount --rbind /sys {here}/root/sys",
        ]
        for folder in self.visible:
            lines += self._parents(folder)
            target = shlex.quote(f"{self.scratch}/root{folder}")
            lines.append(f"mkdir -p {target}")
            lines += _bind(folder, target, read_only=True, recursive=True)
        for mount in self.mounts:
            # Links are followed inside: /var/run leads to /run, and must not lead out of the new root.
            target = f"$(chroot {here}/root realpath -m {shlex.quote(mount.target)})"
            lines.append(f"target={here}/root{target}")
            lines += _point(mount.source)
            lines += _bind(mount.source, '"$target"', read_only=mount.read_only)
        if self.read_only:
            lines.append(f"mount -o remount,bind,ro {here}/root")
        start = [*identity.command(), "env", "-i"]
        start += [f"{name}={value}" for name, value in environment.items()]
        # The command is looked for in the container's own PATH.
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', directory, *command]
        lines.append(f"touch {shlex.quote(str(made))}")
        lines.append(f"exec chroot {here}/root {shlex.join(start)} {shlex.join(inside)}")
        return "\n".join(lines) + "\n"

    def _parents(self, folder: Path) -> list[str]:
        """Make the parents of a visible folder traversable for every user, in the overlay alone."""
        above = [parent for parent in folder.parents if parent != Path("/")]
        quoted = [shlex.quote(f"{self.scratch}/root{parent}") for parent in reversed(above)]
        return [f"mkdir -p {path} && chmod o+x {path}" for path in quoted]


def _point(source: Path) -> list[str]:
    """Something at $target to mount over."""
    if source.is_dir():
        return ['mkdir -p "$target"']
    return ['mkdir -p "$(dirname "$target")"', 'rm -f "$target"', 'touch "$target"']


def _bind(source: Path, target: str, *, read_only: bool, recursive: bool = False) -> list[str]:
    made = [f"mount --{'rbind' if recursive else 'bind'} {shlex.quote(str(source))} {target}"]
    if read_only:
        made.append(f"mount -o remount,bind,ro {target}")
    return made
