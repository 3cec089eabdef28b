"""Typical mistakes at a first start: one sentence each that says what to do, before any process is started."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from baton import __version__
from baton.cli.up import ready_lines
from baton.local import certs as local_certs
from baton.local import memory, preflight
from baton.local.certs import make_certs
from baton.local.options import UpOptions
from baton.local.state import ClusterState, RedisState
from cluster.errors import ConfigError, UnauthenticatedError
from cluster.kubernetes.api import default_files


def change(model: Path, **changes: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def two_shards(model: Path, *, present: int) -> None:
    (model / "model.safetensors").rename(model / "1.safetensors")
    shutil.copy(model / "1.safetensors", model / "2.safetensors")
    for missing in range(present, 2):
        (model / f"{missing + 1}.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )


def only_pytorch(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (lambda model: (model / "config.json").unlink(), "no config.json there: name the directory of a model"),
    (lambda model: (model / "config.json").write_text("{"), "config.json: Expecting property name"),
    (lambda model: change(model, architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer.json there; routers need"),
    (lambda model: (model / "model.safetensors").unlink(), "no model.safetensors and no model.safetensors.index.json"),
    (only_pytorch, "pytorch_model.bin is of a format that is not read: convert it"),
    (pointer, "model.safetensors is a pointer of Git LFS, not the weights: run git lfs pull there"),
    (lambda model: two_shards(model, present=1), "2.safetensors, which model.safetensors.index.json names, is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "sentence"), DAMAGED)
def test_a_directory_that_cannot_be_served(damage, sentence, model, said):
    damage(model)
    assert sentence in said("up", str(model), "--pool", "process")


def test_the_directory_above_or_a_file_of_a_model(model, said):
    assert f"no config.json there; there is one in {model}" in said("up", str(model.parent))
    assert "is a file: name the directory" in said("up", "--model", str(model / "config.json"))
    assert "no such directory [model]" in said("up", str(model / "none" / "deeper"))


@pytest.mark.parametrize(
    "name",
    [
        *("meta-llama/Llama-3.1-8B", "hf://meta-llama/Llama-3.1-8B", "hf:/meta-llama/Llama-3.1-8B"),
        "https://huggingface.co/meta-llama/Llama-3.1-8B",
    ],
)
def test_the_name_of_a_model_on_the_hub_names_the_download(name, said):
    wanted = "baton fetch hf://meta-llama/Llama-3.1-8B --out Llama-3.1-8B, then baton up Llama-3.1-8B"
    assert wanted in said("up", name) and wanted in said("up", "--model", name)


def test_other_names_of_models_say_what_to_do(said, tmp_path):
    page = said("up", "https://huggingface.co/meta-llama/Llama-3.1-8B/tree/v2.0")
    assert "baton fetch hf://meta-llama/Llama-3.1-8B@v2.0 --out Llama-3.1-8B" in page
    assert "s3:// sources are not downloaded: copy the model to a local directory" in said(
        "up", "s3://bucket/model"
    )
    for name in ("mistral", "hf://"):
        assert "named ORG/NAME: baton fetch hf://ORG/NAME --out DIR" in said("up", name)
    (tmp_path / "m.gguf").touch()
    assert "GGUF is not supported, safetensors are" in said("up", str(tmp_path / "m.gguf"))


def test_files_and_devices_that_are_not_there_are_missed_before_a_start(model, said, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_DRIVER", ())
    assert "--device cuda:1: this machine has no CUDA driver" in said("up", str(model), "--device", "cuda:1")
    keys, certs = tmp_path / "keys.yaml", tmp_path / "certs"
    ask = ("up", str(model), "--pool", "process", "--http-port", "0", "--grpc-port", "0")
    assert f"{keys} cannot be read: No such file" in said(*ask, "--api-keys-file", str(keys))
    keys.write_text("key: 1")
    assert "must hold a list of keys, such as baton keys new prints" in said(
        *ask, "--api-keys-file", str(keys)
    )
    certs.mkdir()
    assert f"no ca.pem there; baton certs --out {certs} makes all" in said(*ask, "--certs", str(certs))


def test_certificates_that_do_not_fit_or_have_expired(model, said, tmp_path):
    def up(certs: Path) -> str:
        return said("up", str(model), "--pool", "process", "--certs", str(certs))

    def copied(name: str, **moved: str) -> Path:
        folder = Path(shutil.copytree(certs, tmp_path / name))
        for to, source in moved.items():
            shutil.copy(certs / source.replace("_", "."), folder / to.replace("_", "."))
        return folder

    certs, old = tmp_path / "certs", tmp_path / "old"
    make_certs(certs, [], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_certs, "SKEW", timedelta(days=3))
        make_certs(old, [], -1)
    assert "the key is that of another certificate" in up(copied("other", router_key="client_key"))
    swapped = copied("swapped", worker_key="worker_pem", worker_pem="worker_key")
    assert "certificate, key and authority are PEM files, each with its own content" in up(swapped)
    expired = up(old)
    assert "router.pem has expired (20" in expired and f"): baton certs --out {old}" in expired


def test_an_authority_that_has_expired(model, said, tmp_path, monkeypatch):
    monkeypatch.setattr(local_certs, "SKEW", timedelta(days=3))
    monkeypatch.setattr(local_certs, "AUTHORITY_DAYS", -1)
    make_certs(tmp_path / "certs", [], 1)
    found = said("up", str(model), "--pool", "process", "--certs", str(tmp_path / "certs"))
    assert "ca.pem has expired (20" in found
    assert f"remove {tmp_path / 'certs' / 'ca.pem'} and ca.key, then baton certs --out" in found


def test_a_hub_that_cannot_be_reached_names_ways_around(said, monkeypatch, tmp_path):
    monkeypatch.setattr("baton.download.hub.PAUSE_SECONDS", 0.0)
    found = said("fetch", "hf://a/b", "--out", str(tmp_path / "m"), "--endpoint", "http://127.0.0.1:1")
    assert (
        "http://127.0.0.1:1 cannot be reached ([Errno 111] Connection refused): --endpoint names a mirror"
        in found
    )


def test_few_open_files(model, said, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    found = said("up", str(model), "--pool", "process")
    assert "a process may open 64 files and connections here (ulimit -Hn)" in found
    assert "raise the limit, as by ulimit -n 65536" in found
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, resource.RLIM_INFINITY))
    assert "--http-port" in said("up", str(model), "--pool", "process", "--http-port", "66000")


def test_a_path_that_is_not_there_is_no_name_on_the_hub(said):
    assert said("up", "../none") == "baton: --model ../none: no such directory [model]"


def test_one_process_without_a_model(said):
    router = said("router")
    assert "model is missing (model directory: tokenizer" in router
    assert "give --model, BATON_MODEL, or name it in the file of --config" in router
    worker = said("prefill")
    assert (
        "engine.model is missing (Hugging Face model directory): give --model, BATON_ENGINE__MODEL" in worker
    )


def test_a_model_that_is_named_twice(model, said):
    assert "named twice, by [MODEL] and by --model" in said("up", str(model), "--model", str(model), code=2)


SETTINGS = [
    (("--decode-tp", "3"), "--decode-tp 3: the model's num_"),
    (("--prefill-tp", "3"), "--prefill-tp 3: the model's num_"),
    (("--max-model-len", "100000000"), "--max-model-len 100000000 exceeds the model's"),
    (("--lora", "x=/nowhere"), "--lora x=/nowhere: no adapter_config.json there"),
    (("--also", "x=/nowhere"), "--also x=/nowhere: no such directory"),
    (("--also", "/nowhere"), "--also /nowhere: write NAME=DIR, with a config.json in DIR"),
    (
        ("--prefill", "0"),
        "--prefill 0 starts no worker that prefills, so nothing would be handed over: give at least 1",
    ),
    (("--kv-memory", "1"), "--kv-memory 1: the KV of one context of"),
    (("--http-port", "66000"), "--http-port"),
    (
        ("--max-model-len", "0"),
        "--max-model-len 0 leaves no room for a prompt: give at least 1, or leave it out",
    ),
    (("--max-model-len", "-1"), "--max-model-len: Input should be greater than or equal to 0"),
    (("--routers", "0"), "--routers must be at least 1"),
    (("--decode-tp", "-2"), "--decode-tp must be at least 1"),
    (("--threads", "0"), "--threads: Input should be greater than or equal to 1"),
    (("--max-batch-tokens", "-5"), "--max-batch-tokens: Input should be greater than or equal to 1"),
    (("--device", "gpu"), "--device: write auto, cpu, cuda (rank n on the node's n-th card) or cuda:N"),
    (("--kv-memory", "-1"), "--kv-memory: '-1' is not a size; write for example 512MiB"),
]


@pytest.mark.parametrize(("flags", "sentence"), SETTINGS)
def test_settings_that_the_model_cannot_have(flags, sentence, model, said):
    assert sentence in said("up", str(model), "--pool", "process", *flags)


def test_a_second_model_is_looked_at_as_the_first_is(model, said, tmp_path):
    second = Path(shutil.copytree(model, tmp_path / "second"))
    (second / "tokenizer.json").unlink()
    assert f"--also x={second}: no tokenizer.json there" in said(
        "up", str(model), "--pool", "process", "--also", f"x={second}"
    )


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_that_is_taken(flag, taken, model, said):
    found = said(
        "up", str(model), "--pool", "process", "--http-port", "0", "--grpc-port", "0", flag, str(taken)
    )
    assert f"{flag} {taken} on 127.0.0.1 cannot be used (Address already in use): give another one" in found


def test_ports_of_one_start_that_are_the_same(model, said):
    up = ("up", str(model), "--pool", "process")
    same = said(*up, "--http-port", "64900", "--grpc-port", "64900")
    assert "--grpc-port 64900 of router 0 is --http-port of router 0 too" in same
    second = said(*up, "--http-port", "64900", "--grpc-port", "64901", "--routers", "2")
    assert "--http-port 64901 of router 1 is --grpc-port of router 0 too" in second
    assert "at least 2 apart" in second


def test_a_host_of_workers_that_is_none_of_this_machine(model, said, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("worker: {host: 203.0.113.7}")
    up = ("up", str(model), "--pool", "process", "--http-port", "0", "--grpc-port", "0")
    found = said(*up, "--config", str(file))
    assert "--config: host 203.0.113.7 of decode workers cannot be used (Cannot assign requested" in found


def test_an_environment_without_ray(model, said, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "RAY", tmp_path / "ray")
    found = said("up", str(model), "--http-port", "0", "--grpc-port", "0")
    assert f"--pool ray: there is no {tmp_path / 'ray'}: pip install 'baton-serve[all]', or" in found
    assert "or start without Ray by --pool process" in found


def test_weights_that_are_larger_than_the_memory(model, monkeypatch):
    """Stored in fp32, bf16 halves them, int8 halves that, and two ranks halve it again."""
    stored = (model / "model.safetensors").stat().st_size
    change(model, dtype="bfloat16", torch_dtype="bfloat16")
    monkeypatch.setattr(UpOptions, "_rank_bytes", {"prefill": stored // 6, "decode": stored // 6})
    ports = {"http_port": 0, "grpc_port": 0}
    with pytest.raises(
        ConfigError, match=r"its weights take at least .* GiB on each of 1 ranks .* smaller model"
    ):
        preflight.check(UpOptions(model, pool="process", router=ports))
    both = UpOptions(
        model,
        pool="process",
        router=ports,
        prefill_tp=2,
        decode_tp=2,
        worker={"engine": {"quantization": "int8"}},
    )
    preflight.check(both)


def test_certificates_and_keys_that_are_left_out(said, tmp_path):
    (tmp_path / "c.pem").touch()
    for flag in ("--tls-cert", "--tls-key"):
        only = ("--tls-ca", str(tmp_path / "c.pem"), flag, str(tmp_path / "c.pem"))
        found = said("generate", "hi", "--target", "127.0.0.1:1", *only)
        assert "a certificate and its key belong together: give both" in found
        alone = said("generate", "hi", "--target", "127.0.0.1:1", *only[2:])
        assert "a certificate and its key belong together: give both" in alone


@pytest.mark.parametrize(
    "words", ["an API key is needed: Authorization: Bearer <key>", "the API key is not valid"]
)
def test_a_key_that_is_left_out_or_wrong(words, said, monkeypatch):
    def refuse() -> None:
        raise UnauthenticatedError(words, field="authorization")

    monkeypatch.setattr("baton.cli.main.app", refuse)
    hint = f"{words}; commands take it from --api-key or BATON_API_KEY [authorization]"
    assert hint in said("generate", "hi")


@pytest.mark.parametrize("key", ["sk-1\n", "sk-ü"])
def test_a_key_that_no_header_may_have_is_not_shown(key, said, tmp_path):
    """As one from a mounted secret, which may end its line: errors of the libraries copied it."""
    (tmp_path / "in").touch()
    for command in (("status",), ("top", "--once"), ("batch", str(tmp_path / "in"), str(tmp_path / "out"))):
        found = said(*command, "--api-key", key)
        assert "api_key: has characters that no header may have" in found and "sk-" not in found
    found = said("load", "--api-key", key, code=2)
    assert "api_key: has characters that no header may have" in found and "sk-" not in found


def test_the_word_of_other_servers_and_the_version(said):
    assert "`baton up MODEL` starts a whole cluster" in said("serve", "llama", "--port", "1")
    assert said("--version", code=0) == f"baton {__version__}"


def test_no_kubernetes_cluster(said, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert f"there is no {tmp_path / 'none'}, and this is no pod of one" in said("doctor")


@pytest.mark.parametrize("text", ["{", "[1]", "a: 1", "\x00"])
def test_a_file_that_is_no_kubeconfig(text, said, monkeypatch, tmp_path):
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    assert "no way to a cluster: " in said("doctor", "--kubeconfig", str(file))
    monkeypatch.setenv("KUBECONFIG", str(file))
    assert "there is no" not in said("doctor")


def test_an_empty_variable_is_as_none_for_the_kubeconfig(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "")
    assert default_files() == ["~/.kube/config"]


ROOT = Path(__file__).resolve().parents[2]
MISTAKES_IN_A_PROCESS = """
import sys
from baton.cli.entry import main
for flags in (["--http-port", "66000"], ["--max-model-len", "10000000"], ["nowhere"]):
    sys.argv[1:] = ["up", *(["demo/model"] if len(flags) > 1 else []), *flags]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 1, ended.code
    else:
        raise AssertionError(flags)
print(len(sys.modules), *{"torch", "ray", "nixl", "numba", "transformers"} & sys.modules.keys())
"""


def test_mistakes_are_found_without_slow_imports():
    """Two seconds are what such a sentence may take, and torch alone takes as long. Counted, because seconds depend on the
    machine: 904 modules when this was written."""
    words = [sys.executable, "-c", MISTAKES_IN_A_PROCESS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--http-port" in done.stderr and "nowhere: no such directory" in done.stderr, done.stderr
    modules, *slow = done.stdout.split()
    assert (slow, int(modules) < 1_500) == ([], True), done.stdout


def test_what_a_started_cluster_says(model, tmp_path):
    """The line for `curl` is one that a shell runs: with the authority and a key where they are asked for."""
    state = ClusterState(
        "http://127.0.0.1:8000", "127.0.0.1:50051", RedisState("", None), [], [], [], 1, "/tmp/b/logs"
    )
    plain = ready_lines(state, UpOptions(model, router={"served_model_name": "it's"}))
    assert plain[0].startswith("ready  http http://127.0.0.1:8000  grpc 127.0.0.1:50051")
    assert "http://127.0.0.1:8000/ui" in plain[1] and plain[3].endswith("/tmp/b/logs")
    words = shlex.split(plain[2].removeprefix("try"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    keys, certs = tmp_path / "keys.yaml", tmp_path / "certs"
    keys.touch()
    options = UpOptions(model, certs=certs, router={"api_keys_file": keys})
    words = shlex.split(ready_lines(state, options)[2].removeprefix("try"))
    assert words[1:5] == ["--cacert", str(certs / "ca.pem"), "-H", "authorization: Bearer KEY"]
    mutual = UpOptions(model, certs=certs, require_client_certs=True)
    words = shlex.split(ready_lines(state, mutual)[2].removeprefix("try"))
    own = ["--cert", str(certs / "client.pem"), "--key", str(certs / "client.key")]
    assert words[1:7] == ["--cacert", str(certs / "ca.pem"), *own]
