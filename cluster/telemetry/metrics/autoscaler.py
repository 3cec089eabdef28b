"""Metrics of the autoscaler, in a process of its own or inside Ray Serve's controller."""

from __future__ import annotations

from functools import partial

from cluster.telemetry.metrics.declaration import Counter, Gauge, Process

_OF: tuple[Process, ...] = ("autoscaler",)
counter, gauge = partial(Counter, _OF), partial(Gauge, _OF)

DESIRED_REPLICAS = gauge(
    "baton_autoscaling_desired_replicas", "replicas", "Replicas requested from the platform", "model", "pool"
)
CURRENT_REPLICAS = gauge(
    "baton_autoscaling_current_replicas", "replicas", "Replicas that serve", "model", "pool"
)
NEEDED_REPLICAS = gauge(
    "baton_autoscaling_needed_replicas",
    "replicas",
    "Replicas for the load, before limits and budget",
    "model",
    "pool",
)
GPUS_ASKED = gauge("baton_autoscaling_gpus_asked", "GPUs", "GPUs of all pools, draining replicas included")
GPU_BUDGET = gauge("baton_autoscaling_gpu_budget", "GPUs", "GPUs that all pools may take")
LEADER = gauge(
    "baton_autoscaling_leader",
    "0 or 1",
    "1 while this process is the leader, whose decisions are carried out",
)
DECISIONS = counter(
    "baton_autoscaling_decisions_total",
    "decisions",
    "Decisions by reason",
    "model",
    "pool",
    "reason",
)
CHANGES = counter(
    "baton_autoscaling_changes_total",
    "decisions",
    "Decisions that changed a pool",
    "model",
    "pool",
    "direction",
)
ERRORS = counter(
    "baton_autoscaling_errors_total",
    "rounds",
    "Rounds without a decision, or whose decision was not carried out",
    "part",
)
