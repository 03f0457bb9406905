"""What a stage computes on: device, precision, its share of the cores."""

from __future__ import annotations

import torch

from .config import ThinpipeError
from .topology import Topology, usable_cores


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device a stage computes on. Raises ThinpipeError if it isn't there."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise ThinpipeError(f"run.device = {name!r} is not available on this machine; use 'cpu' or 'auto'")
    return torch.device("cuda", local_rank % torch.cuda.device_count()) if name == "cuda" else torch.device(name)


def use_bf16(precision: str, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16; "auto" says yes where the hardware multiplies it natively."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


def share_cores(topology: Topology) -> None:
    """Divide this machine's cores between its stages; without it every stage would start a thread per core.

    A smaller number that is already set (OMP_NUM_THREADS) stays.
    """
    torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // topology.local_world)))
