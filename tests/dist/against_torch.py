"""Run by 4 processes: our schedules' gradients against torch's own ScheduleGPipe, bit for bit; bytes on the wire; uneven splits."""

import json

import torch
from conftest import tiny
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from thinpipe.config import from_dict
from thinpipe.model import Stage, build_stages
from thinpipe.pipeline import Pipeline
from thinpipe.tally import Tally
from thinpipe.topology import Topology, connect

VOCAB = 70_000  # beyond 16-bit ids (FIELD.md kind 16)
torch.set_num_threads(1)


def config(name: str, source: str = "local", warmup: int | None = None, wire: str = "bfloat16"):
    pipeline = {"stages": 4, "schedule": name, "micro_batches": 8} | ({"warmup": warmup} if warmup else {})
    layout = {"model": {"layers": 8}, "compression": {"segments": 8, "wire": wire}}
    return from_dict(tiny(pipeline=pipeline, data={"source": source}, **layout)).check()


def grads(stage: Stage) -> list[torch.Tensor]:
    return [p.grad.clone() for p in stage.parameters() if p.grad is not None]


class ForTorch(torch.nn.Module):
    """Our stage as torch's schedules want it: bfloat16 tensors at both ends, rounding known to autograd."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, received: torch.Tensor, tokens_BS: torch.Tensor | None = None) -> torch.Tensor:
        first = tokens_BS is None
        out = self.stage(None if first else received.float(), received if first else tokens_BS)
        return out if self.stage.is_last else out.to(torch.bfloat16)


def torch_gpipe(here: Topology, tokens: torch.Tensor) -> list[torch.Tensor]:
    (stage,) = build_stages(config("gpipe"), VOCAB, [here.stage])
    wire = torch.empty(2, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    pipe_stage = PipelineStage(
        ForTorch(stage),
        here.stage,
        4,
        torch.device("cpu"),
        input_args=tokens[:2] if here.is_first else wire,
        output_args=torch.zeros((), requires_grad=True) if here.is_last else wire,
        group=here.group,
    )
    schedule = ScheduleGPipe(pipe_stage, 8, loss_fn=lambda loss, _: loss, scale_grads=False)
    if here.is_first:
        schedule.step(tokens)
    else:
        schedule.step(tokens_BS=tokens, target=torch.zeros(16), return_outputs=False)
    return grads(stage)


with connect(60) as here:
    tokens = torch.randint(60_000, VOCAB, (16, 17), generator=torch.Generator().manual_seed(0))
    reference = torch_gpipe(here, tokens)
    report: dict[str, object] = {}
    for label, c in {
        "wan": config("wan"),
        "wan, warm-up 4": config("wan", warmup=4),
        "gpipe": config("gpipe"),
        "1f1b": config("1f1b"),
        "ids travel": config("wan", source="first"),
        "float32 wire": config("wan", wire="float32"),
    }.items():
        (stage,) = build_stages(c, VOCAB, [here.stage])
        pipeline = Pipeline(stage, here, c.pipeline, c.micro_batch)
        for another in (True, False):  # the second step's receives are posted before an evaluation: they must not meet
            stage.zero_grad()
            ours = tokens if c.data.source == "local" or here.is_first else None
            loss = pipeline.step(ours, another)
            evaluated = pipeline.evaluate([ours])
        equal = all(torch.equal(a, b) for a, b in zip(grads(stage), reference, strict=True))
        wire = pipeline.take_wire()
        total = pipeline.tally(Tally(loss=loss, wire_forward=wire.forward / 2, wire_backward=wire.backward / 2))
        report[label] = {
            "equal": all(here.gather(equal)),
            "loss": total.loss,
            "evaluated": evaluated,
            "forward": total.wire_forward,
            "backward": total.wire_backward,
        }
    if here.is_first:
        print("RESULT " + json.dumps(report), flush=True)
