"""docs/metrics.md, made from the declarations: `python -m deploy.observability.metrics_doc` writes it, `--check` compares
it."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.telemetry.metrics.catalogue import DECLARED
from cluster.telemetry.metrics.declaration import Declaration
from cluster.telemetry.vllm_names import STAGES, VLLM_NAMES

TARGET = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_HEAD = """# Metrics

Made from the declarations in `cluster/telemetry/metrics/` by `python -m deploy.observability.metrics_doc`; `make check`
compares it, and a test compares the declarations with a live scrape.

Routers show theirs at `/metrics` of the HTTP port, workers at `/metrics` of their own metrics port. Everything of a
worker carries `worker` and `role` besides. The autoscaler's are at `/metrics` of `baton autoscale`, or of the node that
runs Ray Serve's controller ([autoscaling.md](autoscaling.md)). The usual `process_…` metrics are there too. How to read
them: [observability.md](observability.md).

| metric | type | unit | labels | shown by | what it is |
|---|---|---|---|---|---|
"""
_VLLM = """
## vLLM's names

With `metrics_aliases: vllm` these stand beside ours, with the label `model_name`. Counters end in `_total` here too.

| vLLM's | the same as |
|---|---|
"""


def document() -> str:
    rows = [_row(DECLARED[name]) for name in sorted(DECLARED)]
    aliases = [f"| `{name}` | `{family}` |\n" for family, name in VLLM_NAMES.items()]
    aliases += [
        f'| `{name}` | `baton_stage_seconds{{stage="{stage}"}}` |\n' for stage, name in STAGES.items()
    ]
    return _HEAD + "".join(rows) + _VLLM + "".join(aliases)


def _row(one: Declaration) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{one.name}` | {one.kind} | {one.unit} | {labels} | {', '.join(one.shown_by)} | {one.help} |\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if TARGET.is_file() and TARGET.read_text() == document():
            return 0
        print(
            "docs/metrics.md is not what the declarations say: run python -m deploy.observability.metrics_doc"
        )
        return 1
    TARGET.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
