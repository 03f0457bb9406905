"""Run by 3 processes: every codec over real boundaries. Bytes as metered; the loss; and what a NaN behind a lossy wire does."""

import json
import math

import torch
from conftest import tiny

from thinpipe import planner
from thinpipe.config import from_dict
from thinpipe.model import build_stages
from thinpipe.pipeline import Pipeline
from thinpipe.tally import Tally
from thinpipe.topology import connect

VOCAB = 300
torch.set_num_threads(1)
CODECS = {
    "subspace int8": {"wire": "int8"},
    "subspace int4, rank 7": {"wire": "int4", "rank": 7},
    "quantize int2": {"method": "quantize", "wire": "int2"},
    "quantize int1, nearest": {"method": "quantize", "wire": "int1", "rounding": "nearest"},
    "topk": {"method": "topk", "rank": 5},
    "topk int4": {"method": "topk", "rank": 5, "wire": "int4"},
    "lowrank": {"method": "lowrank"},
}

with connect(60) as here:
    tokens = torch.randint(VOCAB, (16, 17), generator=torch.Generator().manual_seed(0))
    for name, compression in CODECS.items():
        c = from_dict(tiny(compression={"segments": 8, **compression}, pipeline={"stages": 3}, data={"source": "first"})).check()
        (stage,) = build_stages(c, VOCAB, [here.stage])
        pipeline = Pipeline(stage, here, c.pipeline, c.micro_batch)
        loss = pipeline.step(tokens if here.is_first else None)
        wire = pipeline.take_wire()
        whole = pipeline.tally(Tally(loss=loss, wire_forward=wire.forward, wire_backward=wire.backward))
        stage.zero_grad()
        if here.stage == 1:
            next(iter(stage.layers.values())).attn.o.weight.data[0, 0] = math.nan  # type: ignore[union-attr]
        loss = pipeline.step(tokens if here.is_first else None)
        broken = pipeline.tally(Tally(loss=loss))
        forward, backward = (2 * c.pipeline.micro_batches * size for size in planner.message_bytes(c))
        seen = here.gather([math.isnan(broken.loss), not math.isfinite(broken.norm)])
        if here.is_first:
            sent = [whole.wire_forward, whole.wire_backward]
            row = {"codec": name, "loss": whole.loss, "norm": whole.norm, "sent": sent, "planned": [forward, backward], "refused": seen}
            print("RESULT " + json.dumps(row), flush=True)
