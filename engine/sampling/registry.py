"""The sampler of a device."""

from __future__ import annotations

import torch

from engine.sampling.base import Sampler
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.host_sampler import HostSampler


def sampler_for(device: torch.device) -> Sampler:
    return HostSampler() if device.type == "cpu" else DeviceSampler(device)
