"""Versions in the tags of images, each from the one file that has it. Needs Python alone, as on a machine that publishes.

python3 -m deploy.versions tag IMAGE [SUFFIX]    the chart's: the version of Redis or rclone, or Baton's
python3 -m deploy.versions check TAG             fails unless git's TAG (v1.2.3) is the version of chart and package
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "baton"
_FILES = {
    "appVersion": (CHART / "Chart.yaml", r'^appVersion: "?([^"\s]+)"?$'),
    "VERSION": (ROOT / "cluster" / "version.py", r'^VERSION = "([^"]+)"$'),
    "model.s3.tag": (CHART / "values.yaml", r'^  s3:\n(?:(?:    .*)?\n)*?    tag: "?([^"\s]+)"?$'),
    "redis.tag": (CHART / "values.yaml", r'^redis:\n(?:(?:  .*)?\n)*?  tag: "?([^"\s]+)"?$'),
}
_OWN_VERSIONS = {"redis": "redis.tag", "rclone": "model.s3.tag"}


def version(name: str) -> str:
    """The one of `_FILES`. Raises ValueError naming the file that has it not, or twice."""
    file, pattern = _FILES[name]
    found: list[str] = re.findall(pattern, file.read_text(), re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"{file.relative_to(ROOT)} names {name} {len(found)} times")
    return found[0]


def tag_of(image: str, suffix: str = "") -> str:
    """The tag by which the chart names an image. Those of Debian's programs are the programs' own versions: an upgrade of
    Baton does not restart Redis."""
    return version(_OWN_VERSIONS[image]) if image in _OWN_VERSIONS else version("appVersion") + suffix


def why_not(git_tag: str) -> str:
    """Empty: what git calls `git_tag` may be published."""
    wanted = git_tag.removeprefix("v")
    wrong = [
        f"{name} is {version(name)} in {_FILES[name][0].relative_to(ROOT)}"
        for name in ("appVersion", "VERSION")
        if version(name) != wanted
    ]
    if git_tag == wanted or wrong:
        return f"the tag {git_tag} cannot be published: {', '.join(wrong) or 'it must begin with v'}"
    return ""


def main(words: list[str]) -> int:
    if words[:1] == ["tag"] and len(words) in (2, 3):
        print(tag_of(*words[1:]))
        return 0
    if words[:1] == ["check"] and len(words) == 2:
        if reason := why_not(words[1]):
            print(reason, file=sys.stderr)
        return 1 if reason else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
