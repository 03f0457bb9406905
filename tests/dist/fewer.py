"""A pipeline of some of the processes of a script."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from thinpipe.topology import Topology


def first(world: Topology, stages: int) -> Topology | None:
    """The pipeline of the first `stages` processes; None on the others. Every process must call it."""
    group = dist.new_group(list(range(stages)), backend="gloo")
    return replace(world, stages=stages, group=group) if world.stage < stages else None
