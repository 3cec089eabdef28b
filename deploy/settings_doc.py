"""docs/settings.md, made from the settings' models: `python -m deploy.settings_doc` writes it, `--check` compares it."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.cli.autoscale import AutoscaleConfig
from cluster.config.base import Frozen, flag_text, flags, settings
from cluster.config.router import RouterConfig
from cluster.config.worker import WorkerConfig

TARGET = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_MODELS: dict[str, tuple[type[Frozen], str]] = {
    "Router": (RouterConfig, "`baton router`; in the chart, `router.config`."),
    "Worker": (
        WorkerConfig,
        "`baton prefill`, `baton decode`; in the chart, `prefill.config`, `decode.config`.",
    ),
    "Autoscaler": (AutoscaleConfig, "`baton autoscale`; in the chart, `autoscaling.config`."),
    "Autoscaling on Ray": (ServeAutoscalingConfig, "`baton up --autoscaling FILE`, and Serve applications."),
}
_HEAD = """# Settings

Made from the models in `cluster/config/` by `python -m deploy.settings_doc`; `make check` compares it.

Each setting can be given as a flag, as an environment variable, or in the YAML file that `--config` names, nested as its
name is here (`engine.dtype` is `dtype` under `engine`). The flag wins over the variable, the variable over the file. Sizes
may have a unit (`512MiB`). `baton up` has the flags of routers and workers as well; its `--config` holds sections
`router`, `worker`, `prefill` and `decode`. Secrets have no flag: every user of a machine can read command lines.
An empty variable is an empty text: where that is no value, the error names the variable. `baton up` leaves it out.
"""


def document() -> str:
    parts = [_HEAD]
    for title, (model, users) in _MODELS.items():
        names = flags(model)
        parts.append(f"\n## {title}\n\n{users}\n")
        for panel in dict.fromkeys(one.panel for one in settings(model)):
            parts.append(
                f"\n### {panel}\n\n| setting | flag | environment | default | meaning |\n|---|---|---|---|---|\n"
            )
            for one in (one for one in settings(model) if one.panel == panel):
                flag = f"`{flag_text(names[one.path])}`" if one.path in names else "–"
                meaning = (one.field.description or "").replace("|", "\\|")
                default = f"`{one.default}`" if one.default else ""
                parts.append(
                    f"| `{'.'.join(one.path)}` | {flag} | `{one.environment}` | {default} | {meaning} |\n"
                )
    return "".join(parts)


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if TARGET.is_file() and TARGET.read_text() == document():
            return 0
        print("docs/settings.md is not what the models say: run python -m deploy.settings_doc")
        return 1
    TARGET.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
