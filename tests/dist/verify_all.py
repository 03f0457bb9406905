"""Run by 8 processes: both checks of `verify` for every method, schedule and number of stages, then the pipeline broken on purpose."""

import itertools
import json
import sys

import torch
from conftest import tiny
from fewer import first

from thinpipe import optim, pipeline, schedule, verify
from thinpipe.config import Config, from_dict
from thinpipe.topology import Topology, connect

VOCAB = 64
torch.set_num_threads(1)


def config(schedule_name: str, stages: int, tied: bool = False, source: str = "local", **compression: str | int) -> Config:
    pipeline_group = {"stages": stages, "schedule": schedule_name, "micro_batches": 8}
    groups = {"compression": compression, "pipeline": pipeline_group, "model": {"tied": tied}, "data": {"source": source}}
    return from_dict(tiny(**groups)).check()


def check(topologies: dict[int, Topology | None], label: str, **what) -> None:
    here = topologies[what["stages"]]
    if here is None:
        return
    tokens = torch.randint(0, VOCAB, (16, 17), generator=torch.Generator().manual_seed(0))
    result = verify.compare(config(**what), here, VOCAB, tokens)
    if here.is_first:
        print("RESULT " + json.dumps({"label": label, **result}), flush=True)


with connect(60) as world:
    topologies = {stages: first(world, stages) for stages in (1, 2, 4, 8)}
    for method, name in (("none", "wan"), ("subspace", "wan"), ("subspace", "gpipe"), ("subspace", "1f1b")):
        for stages in (1, 2, 4, 8):
            check(topologies, "whole", method=method, schedule_name=name, stages=stages)
    for method, stages in itertools.product(("none", "subspace"), (1, 2, 8)):
        check(topologies, "tied, ids on the wire", method=method, schedule_name="wan", stages=stages, tied=True, source="first")
    for method, wire in (("subspace", "int4"), ("quantize", "int1"), ("topk", "bfloat16"), ("topk", "int8"), ("lowrank", "int4")):
        check(topologies, "lossy", method=method, wire=wire, schedule_name="1f1b", stages=4)
    check(topologies, "lossy", method="subspace", wire="int4", schedule_name="wan", stages=8, source="first")

    for method, table, tied in (("projected", 0, True), ("projected", "full", False), ("subspace", 4, False), ("none", "full", False)):
        check(topologies, "tables", method=method, stage_table=table, tied=tied, schedule_name="wan", stages=4)
    for method, table, tied in (("projected", "full", True), ("subspace", 4, False), ("none", 4, False)):
        local = {"method": method, "stage_table": table, "local_loss": 0.3}
        check(topologies, "local losses", **local, tied=tied, schedule_name="wan", stages=4, source="first")

    broken = {"method": "subspace", "schedule_name": "wan", "stages": 4}
    original = schedule.actions

    def dropping(*arguments):
        """One micro-batch is never computed, on any stage."""
        return [[action for action in actions if action.micro_batch != 7] for actions in original(*arguments)]

    schedule.actions = dropping
    check(topologies, "dropped micro-batch", **broken)
    schedule.actions = original

    total_tally = pipeline.Pipeline.tally

    def tally_of_this_stage(self, own):
        total = total_tally(self, own)
        total.square_norm = sum(pipeline.gradient_squares(self.stage))
        return total

    pipeline.Pipeline.tally = tally_of_this_stage
    check(topologies, "clip per stage", **broken)
    pipeline.Pipeline.tally = total_tally

    clip = optim.clip_scale
    verify.clip_scale = lambda norm, limit: 1.0
    check(topologies, "no clip", **broken)
    verify.clip_scale = clip
    check(topologies, "whole again", **broken)
sys.exit(0)
