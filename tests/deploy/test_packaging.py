"""The base install and each extra: their modules import with the packages that they install and no others."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from baton.cli.main import missing_install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
ABSENT = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Absent())
from baton.cli.main import main
main()
"""
# Third-party modules that the interpreter's distributions name otherwise.
OWN = {
    "baton",
    "cluster",
    "decode_worker",
    "engine",
    "kv_transfer",
    "loadgen",
    "prefill_worker",
    "router",
    "wire",
    "worker",
}
EXTRAS = {
    "router": ["router"],
    "loadgen": [],
    "worker": ["worker", "ray"],
    "prefill_worker": ["worker"],
    "decode_worker": ["worker"],
    "kv_transfer": ["worker", "cuda"],
    "engine": ["worker", "cuda"],
}


def name_of(requirement: str) -> str:
    return canonical(re.split(r"[\[<>=!~; ]", requirement)[0])


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def distributions() -> dict[str, set[str]]:
    """The distributions of each importable module."""
    return {module: {canonical(name) for name in names} for module, names in packages_distributions().items()}


def extras_only() -> set[str]:
    """Modules that no base install has."""
    base = {name_of(one) for one in PROJECT["dependencies"]}
    extra = {name_of(one) for extra in PROJECT["optional-dependencies"].values() for one in extra} - base
    return {module for module, names in distributions().items() if names & extra and not names & base}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of `baton` without the modules of the extras."""
    command = [sys.executable, "-c", BASE, ",".join(sorted(extras_only())), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "load",
        "doctor",
        "status",
        "top",
        "generate",
        "chat",
        "drain",
        "certs",
        "keys new",
        "fetch",
        "router",
        "decode",
        "up",
    ],
)
def test_the_base_install_has_every_command_and_its_help(command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr


def test_the_base_install_does_what_needs_no_extra(tmp_path: Path) -> None:
    assert "tenant: acme" in run("keys", "new", "--tenant", "acme").stdout
    assert run("certs", "--out", str(tmp_path / "certs")).returncode == 0
    refused = run("status", "--url", "http://127.0.0.1:1")
    assert (refused.returncode, refused.stderr[:7]) == (1, "baton: ")


def test_a_command_whose_extra_is_missing_names_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    model = str(ROOT / "demo" / "model")
    done = run("router", "--model", model, "--redis-url", "unix:///nowhere", "--secret-file", str(secret))
    assert done.returncode == 1 and "pip install 'baton-serve[router]'" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("module", "install"),
    [
        ("torch", "'baton-serve[worker]'"),
        ("starlette.routing", "'baton-serve[router]'"),
        ("ray", "'baton-serve[all]'"),
        ("kubernetes.client", "baton-serve"),
        ("json", None),
    ],
)
def test_the_install_of_a_module(module: str, install: str | None) -> None:
    assert missing_install(module) == install


# Of their modules Baton imports none by itself, or the command line cannot start without them.
NOT_NAMED = {"grpcio", "protobuf", "pydantic", "pydantic-core", "pydantic-settings", "rich", "typer"}
MODULES = {"pyyaml": "yaml", "googleapis-common-protos": "google", "grpcio-health-checking": "grpc_health"}
MODULES |= {
    "grpcio-reflection": "grpc_reflection",
    "opentelemetry-sdk": "opentelemetry",
    "baton-serve": "torch",
}
MODULES |= {
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "prometheus-client": "prometheus_client",
}


def test_every_requirement_has_a_sentence_where_it_is_missing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for name, of in project["optional-dependencies"].items() if name != "dev" for one in of]
    names = {re.split(r"[\[>=]", one)[0] for one in (*project["dependencies"], *extras)} - NOT_NAMED
    assert [name for name in sorted(names) if missing_install(MODULES.get(name, name)) is None] == []


@pytest.mark.parametrize("room", EXTRAS)
def test_a_room_imports_what_its_extras_install(room: str) -> None:
    """Installed distributions also bring others of their own: starlette with fastapi."""
    named = {name_of(one) for extra in EXTRAS[room] for one in PROJECT["optional-dependencies"][extra]}
    named |= {name_of(one) for one in PROJECT["dependencies"]} | {
        "starlette",
        "llvmlite",
        "hiredis",
        "urllib3",
    }
    named |= {"opentelemetry-api"}
    for file in (ROOT / room).rglob("*.py"):
        for module in imported(file):
            found = distributions().get(module)
            assert found is None or found & named, f"{file.relative_to(ROOT)} imports {module} of {found}"


def imported(file: Path) -> set[str]:
    """Top-level names of third-party modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - OWN - set(sys.stdlib_module_names)
