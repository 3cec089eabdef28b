"""Workers of one node serve where Ray is not installed, as in the image `worker`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton.client import Client
from tests.end_to_end.handover import assert_all_free
from tests.harness.checkpoints import prompt_ids

pytestmark = pytest.mark.long
NEW = 8
FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "never", "--kv-memory", "64MiB")
ABSENT = "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n"


def test_a_hand_off_where_ray_cannot_be_imported(tmp_path, monkeypatch, checkpoint, start_cluster) -> None:
    module = tmp_path / "ray" / "__init__.py"
    module.parent.mkdir()
    module.write_text(ABSENT)
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    imports = subprocess.run(
        [sys.executable, "-c", "import ray"], capture_output=True, check=False, timeout=60
    )
    assert imports.returncode != 0, "the test's own module takes precedence"

    cluster = start_cluster(checkpoint("llama"), *FLAGS, forked=False)
    with Client(cluster.grpc) as client:
        answer = client.generate(prompt_ids(40), max_tokens=NEW, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == NEW
    assert answer.timings.kv_bytes_shipped > 0
    assert_all_free(cluster)
