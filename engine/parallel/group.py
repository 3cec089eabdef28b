"""The tensor-parallel ranks of one model. The group of a single rank is the identity, so that no caller branches."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from cluster.addresses import interface_of, source_address, split
from cluster.errors import InternalError, SetupError
from engine.parallel.plan_channel import LeaderChannel, RankChannel

log = logging.getLogger(__name__)
# Once all have loaded, collectives have no time-out: a dead leader is noticed by its pipe to the rank
# (worker/ranks/process.py), a rank that hangs by its beats and arrivals (worker/ranks/watch.py).
UNLIMITED_SECONDS = 10 * 365 * 86400
JOIN_SECONDS = 300.0  # ranks load Python, Ray and torch before they join
CONNECT_SECONDS = 60.0  # of ranks that have all joined, to each other
LOAD_SECONDS = 300.0  # that a rank waits for the others in an operation while they load, until `loaded`
SO_ATTACH_FILTER = 26  # Linux; not among Python's constants
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one BPF instruction: return 0 bytes of the packet


class Arrivals:
    """Number of collective operations that this rank has entered, and the time of the last one (monotonic seconds).

    Written by the thread that runs the plans, read by any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.at = clock()
        self.count = 0

    def arrive(self) -> None:
        self.at = self._clock()  # first: a reader that sees the new count must not see the old time
        self.count += 1


class TpGroup(Protocol):
    rank: int
    size: int
    arrivals: Arrivals

    def all_reduce(self, x: Tensor) -> Tensor:
        """The ranks' sum, in place."""

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The ranks' largest values, element by element; not finite where that of a rank is not. May write to x."""

    def gather_last(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' last dimensions, in order of rank."""

    def share(self, message: bytes | None) -> bytes | None:
        """Return the leader's message on every rank, None for none; of other ranks the argument is None."""


class NullGroup:
    rank = 0
    size = 1

    def __init__(self) -> None:
        self.arrivals = Arrivals()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        return x

    def share(self, message: bytes | None) -> bytes | None:
        return message


class LostRankError(InternalError):
    """A collective operation failed: the ranks may not be at the same place any more."""


class _Together:
    """Context of a collective operation. Its failure means a lost rank and becomes a LostRankError, unlike an exception
    of a rank's own computation."""

    def __init__(self, arrivals: Arrivals):
        self._arrivals = arrivals

    def __enter__(self) -> None:
        self._arrivals.arrive()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, OSError)):
            raise LostRankError(f"a rank of the group was lost: {error}") from error


class DistributedGroup:
    """gloo on CPUs, NCCL on CUDA. Every rank of the process group must be made with the same address."""

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        device: torch.device,
        listener: socket.socket | None = None,
        join_seconds: float = JOIN_SECONDS,
        connect_seconds: float = CONNECT_SECONDS,
        load_seconds: float = LOAD_SECONDS,
    ):
        """`address` is host:port of the leader's store, `listener` the leader's socket that listens there. An operation
        that begins before `loaded` fails after `load_seconds`.

        Raises SetupError if not all ranks join, or connect to each other, in time.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the communicator is made on the current device
        host, _ = split(address)
        _restrict_interfaces(host)
        # A socket made by torch would listen on every interface.
        descriptor = listener.detach() if listener is not None else None
        store = _join(rank, size, address, descriptor, join_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        # NCCL connects, and its threads open connections to the store, at the first operation, which may be later.
        with listening_meanwhile(descriptor) if backend == "gloo" else contextlib.nullcontext():
            try:
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=datetime.timedelta(seconds=connect_seconds),
                )
                self._plans: LeaderChannel | RankChannel = (
                    RankChannel(store, host, rank, connect_seconds)
                    if rank
                    else LeaderChannel(store, host, size, connect_seconds)
                )
            except (RuntimeError, OSError) as error:
                if dist.is_initialized():
                    dist.destroy_process_group()
                # torch names groups by their number in a process: counted, the next one would have another name here than
                # at the other ranks, and none would connect.
                distributed_c10d._world.group_count = 0
                reason = str(error).splitlines()[0]
                raise SetupError(
                    f"rank {rank} of {size} did not connect to all others that joined at {address} within "
                    f"{connect_seconds:.0f} s: {reason}",
                    field="tensor_parallel",
                ) from error
        _limit_operations(load_seconds)
        self.rank = rank
        self.size = size
        self.arrivals = Arrivals()
        self._together = _Together(self.arrivals)

    def loaded(self) -> None:
        """This rank has loaded its share: no operation that it begins from here on has a time-out."""
        _limit_operations(UNLIMITED_SECONDS)

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._together:
            dist.all_reduce(x)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        x.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # gloo's maximum of NaN and a number may be the number
        with self._together:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def gather_last(self, x: Tensor) -> Tensor:
        pieces, own = [torch.empty_like(x) for _ in range(self.size)], x.contiguous()
        with self._together:
            dist.all_gather(pieces, own)
        return torch.cat(pieces, -1)

    def share(self, message: bytes | None) -> bytes | None:
        with self._together:
            if isinstance(self._plans, RankChannel):
                return self._plans.receive() or None
            self._plans.send(message or b"")
        return message

    def close(self) -> None:
        self._plans.close()
        dist.destroy_process_group()


def _limit_operations(seconds: float) -> None:
    """Set the time limit of the process group's operations that begin from now on."""
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))


def _join(rank: int, size: int, address: str, descriptor: int | None, seconds: float) -> dist.TCPStore:  # type: ignore[name-defined]
    """The store at `address`, once all ranks have joined it. Raises SetupError."""
    host, port = split(address)
    try:
        # Made here: init_process_group would join without a time-out, as it has none for collectives.
        timeout = datetime.timedelta(seconds=seconds)
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, rank == 0, timeout=timeout, master_listen_fd=descriptor
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise SetupError(
            f"rank {rank} of {size} did not join the others at {address} within {seconds:.0f} s: {reason}",
            field="tensor_parallel",
        ) from error


def _restrict_interfaces(leader: str) -> None:
    """Let gloo and NCCL open ports on the interface towards the leader, unless the environment names others."""
    own = interface_of(leader) or interface_of(source_address(leader))
    if own:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={own}")


@contextlib.contextmanager
def listening_meanwhile(store: int | None = None) -> Iterator[None]:
    """After the block, `store` and sockets that began to listen inside it accept no new connection; open connections
    stay.

    gloo and the store listen as long as the process lives, although they are needed only until all ranks have joined.
    gloo keeps the descriptor of every connection that closes without data, and aborts the process when no descriptor is
    free. The store keeps whatever any peer puts into it, without a limit. The sockets are not closed: they are in
    their servers' poll sets, which would fail.
    """
    before = _listening()
    yield
    for descriptor in (_listening() - before) | ({store} if store is not None else set()):
        try:
            _drop_packets(descriptor)
        except OSError as error:
            log.warning("the process group's port cannot be closed to other hosts: %s", error)


def _listening() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else []:
        with contextlib.suppress(OSError):  # closed since it was listed
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(name))
    return found


def _drop_packets(descriptor: int) -> None:
    """Raises OSError if the kernel has no socket filters."""
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
        )
