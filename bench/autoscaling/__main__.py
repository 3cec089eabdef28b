"""`python -m bench.autoscaling`: the day under the policy and in hindsight; writes the figures and a plot."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.autoscaling.day import HOURS, SEED, make_day
from bench.autoscaling.experiment import ITL_SECONDS, TTFT_SECONDS, run_policy, smallest_static
from bench.autoscaling.plot import day_plot


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--plot", type=Path, default=Path("out/bench/autoscaling.svg"))
    given = parser.parse_args()
    day = make_day(given.seed)
    run, static = run_policy(day, HOURS, start=(6, 3)), smallest_static(day, HOURS)
    calm = run.calm_changes(day, HOURS)
    attained = run.outcome.attainment(TTFT_SECONDS, ITL_SECONDS)
    print(f"requests                      {len(day)}")
    print(f"within the objectives         {attained:.4f}")
    print(f"GPU hours                     {run.outcome.gpu_hours:.0f}")
    print(f"smallest fixed size           {static.prefill} + {static.decode}")
    print(f"  within the objectives       {static.outcome.attainment(TTFT_SECONDS, ITL_SECONDS):.4f}")
    print(f"  GPU hours                   {static.outcome.gpu_hours:.0f}")
    print(f"GPU hours, policy over fixed  {run.outcome.gpu_hours / static.outcome.gpu_hours:.3f}")
    print(f"changes                       {len(run.changes)}, at most {max(calm)} in an hour without a ramp")
    print(f"GPUs held at most             {max(run.gpus_held)}")
    given.plot.parent.mkdir(parents=True, exist_ok=True)
    given.plot.write_text(day_plot(day, run))


if __name__ == "__main__":
    main()
