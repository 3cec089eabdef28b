"""Steps, batches, the KV cache."""

from __future__ import annotations

from deploy.observability.boards.parts import Board, Panel, Query, Row, by, mean, quantiles, rate, total


def engine() -> Board:
    return Board(
        "engine",
        "Engine",
        "Queues, batches, steps and KV memory of each worker.",
        [_queues(), _batch(), _steps(), _kv_memory(), _processes()],
    )


def _queues() -> Row:
    return Row(
        "Queues",
        [
            by(
                "Queued for prefill",
                "short",
                total("baton_prefill_queue_requests", "worker, class"),
                "{{worker}} {{class}}",
                stacked=True,
            ),
            by(
                "The first has queued",
                "s",
                total("baton_prefill_queue_oldest_seconds", "worker"),
                "{{worker}}",
            ),
            by(
                "Prompt tokens not computed yet",
                "short",
                total("baton_waiting_prefill_tokens", "worker"),
                "{{worker}}",
            ),
        ],
    )


def _batch() -> Row:
    return Row(
        "Batch",
        [
            by("Running", "short", total("baton_requests_running", "worker"), "{{worker}}"),
            by("Waiting", "short", total("baton_requests_waiting", "worker"), "{{worker}}"),
            by(
                "Waiting for KV",
                "short",
                total("baton_requests_waiting_for_kv", "worker"),
                "{{worker}}",
            ),
            by(
                "Sequences in a step",
                "short",
                mean("baton_engine_step_requests", "worker"),
                "{{worker}}",
            ),
            by("Tokens in a step", "short", mean("baton_engine_step_tokens", "worker"), "{{worker}}"),
            by("Steps", "ops", rate("baton_engine_steps_total", "worker"), "{{worker}}"),
        ],
    )


def _steps() -> Row:
    return Row(
        "Steps",
        [
            quantiles("With a prompt", "baton_engine_step_seconds", labels='kind="prefill"'),
            quantiles("Decode only", "baton_engine_step_seconds", labels='kind="decode"'),
            Panel(
                "Share of time in steps",
                "percentunit",
                [
                    Query(rate("baton_prefill_seconds_total", "worker"), "{{worker}} prefill"),
                    Query(rate("baton_decode_seconds_total", "worker"), "{{worker}} decode"),
                ],
            ),
        ],
    )


def _kv_memory() -> Row:
    return Row(
        "KV memory",
        [
            by("In use", "percentunit", total("baton_kv_cache_usage_ratio", "worker"), "{{worker}}"),
            by("Resident tokens", "short", total("baton_resident_tokens", "worker"), "{{worker}}"),
            Panel(
                "Short of blocks",
                "ops",
                [
                    Query(rate("baton_preemptions_total", "worker"), "{{worker}} preempted"),
                    Query(rate("baton_reservations_evicted_total", "worker"), "{{worker}} reservations"),
                ],
            ),
        ],
    )


def _processes() -> Row:
    return Row(
        "Processes",
        [
            by("Processor", "short", rate("process_cpu_seconds_total", "instance"), "{{instance}}"),
            by("Memory", "bytes", total("process_resident_memory_bytes", "instance"), "{{instance}}"),
            by(
                "Attempts ended",
                "ops",
                rate("baton_attempts_ended_total", "role, outcome"),
                "{{role}} {{outcome}}",
            ),
        ],
    )
