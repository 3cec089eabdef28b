"""Every command block of the documentation runs, or states why it does not.

The comment right above a block decides:

    <!-- not run: reason -->      it needs a GPU, a Kubernetes cluster, root, hours, …; its flags are checked all the same
    <!-- starts the cluster -->   the cluster of the next kind is started by this block (exactly one)
    <!-- needs a cluster -->      it is run against that cluster (`long`)
    <!-- on the test cluster -->  it is run with Helm against the API server of tests/kubernetes, after those above it
    <!-- on pods -->              it is run against the chart's pods as processes; both `system`, tests/system/helm_life
    none                          it is run by itself, in an empty folder beside links to the repository's folders
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from baton.cli.main import app as APP
from tests.docs.cluster import DocumentedCluster
from tests.docs.pages import ON_CLUSTER, ON_PODS, ROOT, Block, blocks, pages, present_pages

# What is shown and not run: pictures and output.
SHOWN = ("text",)
COMMANDS = ("sh", "python")
NOT_RUN = re.compile(r"not run: \S.+")
STARTS, NEEDS = "starts the cluster", "needs a cluster"
# Blocks of values are rendered, and those with a file's name are that file for the commands after them.
VALUES = re.compile(r"values of the chart(?:, on the test cluster as [a-z-]+\.yaml)?|not values: \S.+")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
INLINE = re.compile(r"`((?:make|baton|python -m) [^`\n]+)`")
ALL = blocks()


def of_kind(marker: str) -> list[Block]:
    return [one for one in ALL if one.language in COMMANDS and one.marker == marker]


def folder(tmp_path: Path) -> Path:
    """An empty folder in which paths of the repository work."""
    for path in ROOT.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def run(block: Block, cwd: Path, environment: dict[str, str], text: str | None = None) -> str:
    text = block.text if text is None else text
    command = [sys.executable, "-c", text]
    if block.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def environment(*programs: Path) -> dict[str, str]:
    path = os.pathsep.join([*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_is_run_or_states_why_not(block: Block) -> None:
    if block.language == "yaml":
        assert yaml.safe_load(block.text)
    elif block.language not in SHOWN:
        assert block.language in COMMANDS, (
            f"{block}: name its language: {', '.join((*COMMANDS, *SHOWN))}, yaml"
        )
        assert block.marker in ("", STARTS, NEEDS, ON_CLUSTER, ON_PODS) or NOT_RUN.fullmatch(block.marker), (
            f"{block}: {block.marker}"
        )


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_fence_is_one_that_these_tests_find(page: Path) -> None:
    """A block that is indented, quoted or fenced by tildes would not be run."""
    hidden = re.findall(r"^(?:[ \t>]+(?:```|~~~).*|~~~.*)$", page.read_text(), re.MULTILINE)
    assert not hidden


def test_values_in_the_page_of_the_chart_are_rendered_or_state_why_not() -> None:
    found = [one for one in ALL if one.page == "docs/kubernetes.md" and one.language == "yaml"]
    assert len(found) > 8
    assert [str(one) for one in found if not VALUES.fullmatch(one.marker)] == []


def test_the_page_of_the_chart_installs_upgrades_and_removes_it() -> None:
    """Blocks that lost their markers would be left out without a sign."""
    text = "\n".join(one.text for one in of_kind(ON_CLUSTER) if one.page == "docs/kubernetes.md")
    assert [
        word for word in ("install", "test", "upgrade", "rollback", "uninstall") if f"helm {word}" in text
    ] == [*("install", "test", "upgrade", "rollback", "uninstall")]
    assert [one.page for one in of_kind(ON_PODS)] == ["docs/kubernetes.md"]


@pytest.mark.parametrize("block", of_kind(""), ids=str)
def test_blocks_that_need_nothing(block: Block, tmp_path: Path) -> None:
    run(block, folder(tmp_path), environment())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentedCluster]:
    (block,) = of_kind(STARTS)
    with DocumentedCluster(shlex.split(block.text), tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(400)  # the first one starts the cluster
@pytest.mark.parametrize("block", of_kind(NEEDS), ids=str)
def test_blocks_against_the_cluster(block: Block, cluster: DocumentedCluster, tmp_path: Path) -> None:
    run(block, folder(tmp_path), environment(cluster.programs), cluster.here(block.text))


@pytest.mark.long
@pytest.mark.timeout(400)  # the first one starts the cluster
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_against_the_cluster(example: Path, cluster: DocumentedCluster, tmp_path: Path) -> None:
    block = Block(example.name, 1, "python", example.read_text(), NEEDS)
    assert run(block, tmp_path, environment(), cluster.here(block.text)).strip()


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell text, as words, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if not set(token) <= set("();<>|&"):
                words.append(token)
            elif words:
                yield words
                words = []


def check(words: list[str]) -> None:
    """Raises AssertionError if make has no such target, Python no such module, or baton no such command or flag."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program = words[0].rsplit("/", 1)[-1]
    if program == "make":
        assert {word for word in words[1:] if re.fullmatch("[a-z-]+", word)} <= TARGETS, words
    elif (
        program == "python"
        and words[1] == "-m"
        and words[2].split(".")[0] in ("bench", "deploy", "tests", "demo")
    ):
        module = ROOT.joinpath(*words[2].split("."))
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words
    elif program == "baton":
        command: Any = typer.main.get_command(APP)
        for word in words[1:]:
            command = getattr(command, "commands", {}).get(word, command)
        assert command.name != "baton" or not words[1:] or words[1].startswith("-"), (
            f"{words}: no such command"
        )
        flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
        used = {word.split("=")[0] for word in words if re.match("--[a-z]", word)}
        assert used <= flags, f"{words}: {command.name} has no {used - flags}"


@pytest.mark.parametrize("block", [one for one in ALL if one.language == "sh"], ids=str)
def test_blocks_name_commands_and_flags_that_exist(block: Block) -> None:
    for words in commands(block.text):
        check(words)


@pytest.mark.parametrize("page", present_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_name_commands_and_flags_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for words in (words for inline in INLINE.findall(text) for words in commands(inline)):
        check(words)
