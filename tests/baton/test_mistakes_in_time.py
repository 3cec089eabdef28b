"""Typical mistakes of a newcomer, each with its sentence in under two seconds from the command on.

Seconds of a processor, because those of a clock depend on what else a machine does; what the clock shows beyond them is
waiting, which counts by the better of two tries. The commands run one after the other in one process, twice: what a
single one takes is at most the imports of all of them, and what it took itself the second time.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.baton.starts import UNREACHABLE

LIMIT_SECONDS = 2.0
SLOW = {"torch", "ray", "nixl", "numba", "transformers"}
PROGRAM = """
import contextlib, io, json, os, sys, time
from baton.cli.entry import main

def ask(words, environment):
    os.environ.update(environment)
    said = io.StringIO()
    began, began_clock = time.process_time(), time.monotonic()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        sys.argv[1:] = words
        code = "no exit"
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    for name in environment:
        os.environ.pop(name, None)
    return code, said.getvalue(), time.process_time() - began, time.monotonic() - began_clock

mistakes = json.load(sys.stdin)
first = [ask(*one) for one in mistakes]
second = [ask(*one) for one in mistakes]
print(json.dumps([first, second, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
# Sentences by mistake: the words of the command with {} for what the test makes, environment, what is said.
UP = "up {model} --pool process --http-port 0 --grpc-port 0"
SECRET = {"BATON_SECRET": "s"}
MISTAKES: dict[str, tuple[str, dict[str, str], str]] = {
    "wrong directory": ("up {folder}/nowhere", {}, "no such directory"),
    "the directory above": ("up {above}", {}, "there is one in"),
    "a name on the Hub": ("up meta-llama/Llama-3.1-8B", {}, "baton fetch hf://meta-llama/Llama-3.1-8B"),
    "GGUF": ("up {folder}/m.gguf", {}, "GGUF is not supported"),
    "a pointer of Git LFS": ("up {pointer}", {}, "run git lfs pull there"),
    "a port that is taken": ("up {model} --pool process --grpc-port 0 --http-port {port}", {}, "cannot be used"),
    "one port for two": ("up {model} --pool process --http-port 64900 --grpc-port 64900", {}, "is --http-port of"),
    "more memory than there is": (f"{UP} --kv-memory 100000GiB", {}, "is more than"),
    "context too long": (f"{UP} --max-model-len 100000000", {}, "exceeds the model's"),
    "ranks that do not divide": (f"{UP} --decode-tp 3", {}, "--decode-tp 3: the model's num_"),
    "no such card": (f"{UP} --device cuda:1", {}, "no CUDA driver"),
    "no such adapter": (f"{UP} --lora x=/nowhere", {}, "no adapter_config.json there"),
    "Redis away": (f"{UP} --redis-url {UNREACHABLE}", {}, "no Redis answers at"),
    "no URL of Redis": (f"{UP} --redis-url localhost:6379", {}, "is not a Redis URL"),
    "no place for a file": (f"{UP} --state-file /proc/none/state.json", {}, "cannot be written"),
    "no certificates": (f"{UP} --certs {{folder}}", {}, "baton certs --out"),
    "no file of keys": (f"{UP} --api-keys-file {{folder}}/none.yaml", {}, "cannot be read"),
    "a misspelt setting": (f"{UP} --config {{folder}}/misspelt.yaml", {}, "write http_port"),
    "the word of other servers": ("serve llama", {}, "`baton up MODEL` starts"),
    "no secret": (f"router --model {{model}} --redis-url {UNREACHABLE}", {}, "the deployment's secret is missing"),
    "no model": (f"prefill --redis-url {UNREACHABLE}", SECRET, "engine.model is missing"),
    "no Redis": ("decode --model {model}", SECRET, "redis_url is missing"),
    "dead target of a load": ("load --target 127.0.0.1:1", {}, "nothing answers there (Connection refused)"),
    "dead target": ("generate hello --target 127.0.0.1:1", {}, "no router answers at"),
    "no cluster": ("status --url http://127.0.0.1:1", {}, "`baton up` starts a cluster on this machine"),
    "a key that cannot be": ("top --once --api-key sk-ü", {}, "api_key: has characters that no header may have"),
    "no Kubernetes": ("doctor", {"KUBECONFIG": "/nowhere/config"}, "there is no /nowhere/config"),
    "a file in a folder's place": ("fetch hf://a/b --out {folder}/m.gguf", {}, "is a file; name a directory"),
}  # fmt: skip


@pytest.fixture
def made(checkpoint, tmp_path) -> Iterator[dict[str, str]]:
    """What the commands name."""
    model, pointer = (
        Path(shutil.copytree(checkpoint("llama"), tmp_path / name)) for name in ("m/model", "pointer")
    )
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    (tmp_path / "m.gguf").touch()
    (tmp_path / "misspelt.yaml").write_text("router: {htp_port: 1}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        paths = {"folder": tmp_path, "model": model, "above": model.parent, "pointer": pointer}
        yield {**{name: str(path) for name, path in paths.items()}, "port": str(taken.getsockname()[1])}


def test_each_mistake_is_one_sentence_in_time(made: dict[str, str]) -> None:
    assert len(MISTAKES) >= 20
    asked = [
        ([word.format(**made) for word in words.split()], environment)
        for words, environment, _ in MISTAKES.values()
    ]
    unset = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "BATON_SECRET")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        env={**environment, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, modules = json.loads(done.stdout.splitlines()[-1])
    for name, (code, said, _, _) in zip(MISTAKES, first, strict=True):
        assert code in (1, 2), f"{name}: {said}"
        assert MISTAKES[name][2] in " ".join(said.split()), f"{name}: {said}"
        assert "Traceback" not in said, name
    assert not SLOW & set(modules)
    spent = {name: here for name, (_, _, here, _) in zip(MISTAKES, second, strict=True)}
    imports = sum(one[2] for one in first) - sum(one[2] for one in second)
    slowest = max(spent, key=lambda name: spent[name])
    print(f"imports {imports:.2f} s, then at most {spent[slowest]:.2f} s: {slowest}")
    assert imports + spent[slowest] < LIMIT_SECONDS, slowest
    waited = {
        name: min(clock - here for *_, here, clock in tries)
        for name, *tries in zip(MISTAKES, first, second, strict=True)
    }
    longest = max(waited, key=lambda name: waited[name])
    assert waited[longest] < LIMIT_SECONDS, f"{longest} waits {waited[longest]:.1f} s"
