"""CUDA graphs. Those of one recorder share a memory pool: only one of them runs at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.graphs.base import Recording


class CudaRecorder:
    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, function: Callable[[], None]) -> Recording:
        with torch.cuda.device(self._device):
            return self._record(function)

    def _record(self, function: Callable[[], None]) -> Recording:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()  # compiles and chooses kernels, which a capture does not allow
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads of the hand-off may allocate and copy meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph
