"""Times that several processes rely on: how often a peer reports that it lives, and what its silence means.

    beat 0.5 s · quiet 0.5 s (ranks) · detach 1.5 s · suspect 2 s · lost 5 s · stalled 10 s … · forgotten 300 s

A silence that is shorter than one beat proves nothing, so every limit is a multiple of the beat: suspect is four beats,
lost is ten. The same three times hold for links, hand-off links and leases, so that routers, workers and the registry
judge one silent worker alike. An engine's own limit is a setting (`step_stall_seconds`).
"""

from __future__ import annotations

# Links between routers and workers, and hand-off links (both directions)
BEAT_SECONDS = 0.5  # an idle sender sends one beat per period; the engine withholds it while it hangs
SUSPECT_SECONDS = 2.0  # four beats: the peer gets no new work, what it has goes on
LOST_SECONDS = 5.0  # ten beats: what the peer has is given up
DETACH_SECONDS = 1.5  # an attempt without a link of its router is cancelled: three beats to open it again

# Leases of workers in Redis. Redis's clock decides; clocks of machines are never compared.
RENEW_SECONDS = BEAT_SECONDS
LEASE_SUSPECT_SECONDS = SUSPECT_SECONDS
LEASE_DEAD_SECONDS = LOST_SECONDS  # after it a worker that comes back rejoins under a new epoch
REFRESH_SECONDS = RENEW_SECONDS / 2  # routers read the registry: a renewal is seen half a period late at most
REGISTER_AGAIN_SECONDS = 4 * RENEW_SECONDS  # for workers to register in a Redis that came back without them
FORGET_SECONDS = 300.0  # the registry drops a dead worker; late exit notices are repeated for twice as long

# A router's charges in Redis: another router removes them once this lease has run out
ROUTER_LEASE_SECONDS = LOST_SECONDS

# Longest pause before a router tries a refused request again, at another decode worker if there is one; pauses double up
# to it. The time for which a decode worker keeps blocks free for a refused hand-off follows from it.
RETRY_PAUSE_SECONDS = 0.5

# Ranks of a worker
RANK_BEAT_SECONDS = 0.15
# Three beats: then its worker withholds its own beats and renewals. After LOST_SECONDS it is unhealthy.
RANK_QUIET_SECONDS = 0.5

# A hand-off without any grant or landed part. Above LOST_SECONDS: a lost link is found first; D grants in turn.
HANDOFF_STALL_SECONDS = 10.0

# A worker process on Ray reports to the replica that supervises it. Silent for long it hangs; a stop of LOST_SECONDS or
# of a busy machine is no reason to kill a worker, and its routers have left it by then.
WORKER_REPORT_SECONDS = BEAT_SECONDS
WORKER_SILENT_SECONDS = 20.0

# Ray's head is asked this often, and each answer may take as long. After `SILENT` its silence is reported; after `LOST`
# what waits for it (a start, a reservation of nodes) ends. Workers that serve do not need it.
RAY_HEAD_PROBE_SECONDS = 2.0
RAY_HEAD_SILENT_SECONDS = LOST_SECONDS
RAY_HEAD_LOST_SECONDS = 15.0

# A router's event loop without a turn: its liveness probe fails. As the default of `step_stall_seconds` for engines.
LOOP_STALL_SECONDS = 30.0
