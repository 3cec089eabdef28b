"""The sentence for a setting that does not exist: what a file, or an environment, may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from cluster.config.base import Frozen, flags, settings


def no_such_setting(model: type[Frozen], where: Sequence[int | str]) -> str:
    """`where`: the path of a setting that `model` has not, as its validation reports it."""
    given = ".".join(map(str, where))
    like = _meant(model, given.replace("-", "_"))
    return f"there is no setting {given}" + (
        f"; write {like}" if like else "; see --help for those there are"
    )


def _meant(model: type[Frozen], given: str) -> str:
    """The setting that is most like it: of the same name elsewhere, by the name of its flag, or misspelt."""
    paths = {
        ".".join(one.path[:depth]): one.path[:depth]  # sections too
        for one in settings(model)
        for depth in range(1, len(one.path) + 1)
    }
    leaf = given.rpartition(".")[2]
    by_flag = {flag: ".".join(path) for path, flag in flags(model).items()}
    same = [dotted for dotted, path in paths.items() if path[-1] == leaf]
    if same or leaf in by_flag:
        return same[0] if same else by_flag[leaf]
    found = difflib.get_close_matches(given, paths, 1) or difflib.get_close_matches(
        leaf, [path[-1] for path in paths.values()], 1, 0.75
    )
    return next(
        (dotted for dotted in paths if found and (dotted == found[0] or dotted.endswith("." + found[0]))), ""
    )
