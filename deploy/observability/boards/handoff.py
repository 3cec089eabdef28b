"""Hand-offs, from Reserve to the commit: rates, stages, slots, parts."""

from __future__ import annotations

from deploy.observability.boards.parts import Board, Panel, Query, Row, by, quantiles, rate, total


def handoff() -> Board:
    return Board(
        "handoff",
        "Hand-off",
        "KV on its way from prefill to decode workers.",
        [_rate(), _time(), _outcome(), _memory()],
    )


def _rate() -> Row:
    return Row(
        "Rate",
        [
            by(
                "KV sent",
                "Bps",
                rate("baton_kv_sent_bytes_total", "transport"),
                "{{transport}}",
                stacked=True,
            ),
            by(
                "KV received",
                "Bps",
                rate("baton_kv_received_bytes_total", "worker"),
                "{{worker}}",
                stacked=True,
            ),
            by(
                "Measured rate of a hand-off",
                "Bps",
                total("baton_transfer_rate_bytes_per_second", "worker"),
                "{{worker}}",
            ),
        ],
    )


def _time() -> Row:
    in_progress = " or ".join(total(f"baton_handoffs_{way}", "worker") for way in ("sending", "receiving"))
    return Row(
        "Time",
        [
            quantiles("Exposed: after prefill has ended", "baton_handoff_exposed_seconds"),
            quantiles("From Reserve to the commit", "baton_handoff_seconds"),
            by("In progress", "short", in_progress, "{{worker}}"),
        ],
    )


def _outcome() -> Row:
    return Row(
        "Outcome",
        [
            Panel(
                "Hand-offs",
                "ops",
                [
                    Query(rate("baton_handoffs_committed_total"), "committed"),
                    Query(rate("baton_handoffs_aborted_total"), "aborted"),
                    Query(rate("baton_handoffs_refused_total"), "refused"),
                ],
            ),
            by("Parts dropped", "ops", rate("baton_kv_parts_dropped_total", "reason"), "{{reason}}"),
            Panel(
                "Parts",
                "ops",
                [
                    Query(rate("baton_kv_parts_verified_total"), "verified"),
                    Query(rate("baton_kv_parts_resent_total"), "sent again"),
                    Query(rate("baton_kv_digest_failures_total"), "corrupted"),
                ],
            ),
        ],
    )


def _memory() -> Row:
    return Row(
        "Memory",
        [
            by(
                "Landing slots",
                "short",
                total("baton_ring_slots_by_state", "state"),
                "{{state}}",
                stacked=True,
            ),
            by(
                "Parts waiting for a slot",
                "short",
                total("baton_ring_parts_waiting", "worker"),
                "{{worker}}",
            ),
            by(
                "Send staging in use",
                "percentunit",
                f"{total('baton_kv_staging_used_bytes', 'worker')} / {total('baton_kv_staging_bytes', 'worker')}",
                "{{worker}}",
            ),
            by("Streams", "short", total("baton_handoff_links", "transport"), "{{transport}}"),
            by(
                "Prompt tokens not shipped",
                "short",
                rate("baton_kv_not_shipped_tokens_total"),
                "held by the decode worker",
            ),
        ],
    )
