"""Schedules over emulated links: torch's GPipe and 1F1B against ours, the bound and the planner's best makespan.

    python benchmarks/schedules.py [--link 80mbit,25ms] [--micro-batches 8 16] [--repeats 5]   # needs the lab: root or unshare -rmn
    python benchmarks/schedules.py --depth                                                     # step time against stages

Every stage is a process on a host of its own. Compute sleeps F and B, or is a real stage of the model. A makespan runs
from the moment when the last stage begins to the moment when the last one has ended; median after one warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from thinpipe import planner, schedule
from thinpipe.calibrate import time_passes
from thinpipe.codecs import Cast
from thinpipe.config import Config, PipelineConfig, from_dict
from thinpipe.model import build_stages
from thinpipe.pipeline import Pipeline
from thinpipe.tally import Tally
from thinpipe.topology import Topology, connect

FORWARD, BACKWARD = 0.020, 0.040  # seconds
TOKENS, VOCAB = 512, 4096  # tokens of a micro-batch


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD)
        return g.clone()


class Sleeper(nn.Module):
    """A stage that sleeps instead of computing; as much of `model.Stage` as the pipeline uses."""

    def __init__(self, here: Topology, width: int) -> None:
        super().__init__()
        self.is_first, self.is_last = here.is_first, here.is_last
        self.spec = SimpleNamespace(context=TOKENS, tied=False)
        self.method = SimpleNamespace(wire_width=width)
        self.codec, self.dtype, self.device, self.bf16 = Cast(torch.bfloat16, width), torch.float32, torch.device("cpu"), False
        self.receives_ids = self.sends_ids = False
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, c: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        if c is None:
            c = torch.ones(tokens.shape[0], TOKENS, self.method.wire_width)
        out: torch.Tensor = _Sleep.apply(c * self.weight)
        return out.mean() if self.is_last else out

    def roles(self) -> list[Any]:
        return [("weight", self.weight, None)]


class ForTorch(nn.Module):
    """A stage as torch's schedules take it: bfloat16 at both ends."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, received: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        first = self.stage.is_first
        out = self.stage(None if first else received.float(), received if tokens is None else tokens)
        return out if self.stage.is_last else out.to(torch.bfloat16)


def real_config(width: int, stages: int, micro_batches: int) -> Config:
    """A model whose messages are as wide: a subspace of rank `width`, or dense from 512."""
    dense = width >= 512
    model = {"width": max(256, width), "layers": stages, "heads": 4, "hidden": 128 if dense else 512, "context": TOKENS}
    compression = {"method": "none" if dense else "subspace", "rank": 64 if dense else width}
    batch = {"batch": micro_batches}
    return from_dict(
        {"model": model, "compression": compression, "pipeline": {"stages": stages, "micro_batches": micro_batches}, "train": batch}
    ).check()


def worker(case: dict[str, Any]) -> None:
    """One stage's part in all rows of a case; the first prints the results as JSON."""
    torch.set_num_threads(1)
    with connect(120) as here:
        stage: Any = Sleeper(here, case["width"])
        if case["real"]:
            (stage,) = build_stages(real_config(case["width"], here.stages, case["micro_batches"]), VOCAB, [here.stage])
        results = [_row(stage, here, name, warmup, case) for name, warmup in case["rows"]]
        compute = here.gather(time_passes(stage, here, 1, 1.0)) if case["real"] else None
        if here.is_first:
            print(json.dumps({"rows": results, "compute": compute}), flush=True)


def _row(stage: Any, here: Topology, name: str, warmup: int | None, case: dict[str, Any]) -> dict[str, float]:
    micro_batches, width, repeats = case["micro_batches"], case["width"], case["repeats"]
    tokens = torch.randint(VOCAB, (micro_batches, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    ours = not name.startswith("torch")
    if ours:
        options = PipelineConfig(stages=here.stages, micro_batches=micro_batches, schedule=name, warmup=warmup)  # type: ignore[arg-type]
        pipeline = Pipeline(stage, here, options, 1)
        step: Callable[[], object] = partial(pipeline.step, tokens)
    else:
        step = _torch_step(stage, here, name, width, micro_batches, tokens)
    makespans = []
    for _ in range(1 + repeats):
        here.gather(0)
        began = time.monotonic()
        step()
        marks = here.gather([began, time.monotonic()])
        makespans.append(max(end for _, end in marks) - max(start for start, _ in marks))
    result = {"makespan": median(makespans[1:])}
    if ours:  # steps that follow each other, the tally between them
        here.gather(0)
        ends = []
        for left in range(repeats, -1, -1):
            loss = pipeline.step(tokens, another=left > 0)
            pipeline.tally(Tally(loss=loss))
            ends.append(time.monotonic())
        result["step"] = (ends[-1] - ends[0]) / repeats
    return result


def _torch_step(stage: Any, here: Topology, name: str, width: int, micro_batches: int, tokens: torch.Tensor) -> Any:
    wire = torch.empty(1, TOKENS, width, dtype=torch.bfloat16, requires_grad=True)
    pipe_stage = PipelineStage(
        ForTorch(stage),
        here.stage,
        here.stages,
        torch.device("cpu"),
        input_args=tokens[:1] if here.is_first else wire,
        output_args=torch.zeros((), requires_grad=True) if here.is_last else wire,
        group=here.group,
    )
    kind = ScheduleGPipe if name == "torch GPipe" else Schedule1F1B
    runner = kind(pipe_stage, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
    target = torch.zeros(micro_batches)
    if here.is_first:
        return lambda: runner.step(tokens)
    return lambda: runner.step(tokens=tokens, target=target, return_outputs=False)


def run(hosts: list[Any], case: dict[str, Any]) -> dict[str, Any]:
    processes = []
    for rank, host in enumerate(hosts):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29511"}
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [*host.command_prefix, sys.executable, str(Path(__file__)), "--worker", json.dumps(case)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=3600)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "a stage failed"
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return result


def compare(link: str, micro_batches: list[int], repeats: int, stages: int, kinds: list[str]) -> None:
    from thinpipe.lab import lab, parse_links

    links = parse_links(link, stages - 1)
    print(f"{stages} stages, {link}, F = {1e3 * FORWARD:g} ms, B = {1e3 * BACKWARD:g} ms; makespan in s, median of {repeats}\n")
    print(
        f"{'compute':>7} {'message':>8} {'M':>3} {'schedule':>16} {'makespan':>9} {'bound':>6} {'best':>6} {'/ best':>7} {'step':>6}",
        flush=True,
    )
    with lab(links, hosts=stages) as net:
        for kind in kinds:
            for width, label in ((64, "64 KiB"), (1024, "1 MiB")):
                for count in micro_batches:
                    message = TOKENS * width * 2
                    costs = planner.Costs.uniform(stages, FORWARD, BACKWARD, message)
                    rows: list[tuple[str, int | None]] = [("torch GPipe", None), ("torch 1F1B", None)]
                    if kind == "sleep":  # with real compute each step takes many seconds
                        rows += [("gpipe", None), ("1f1b", None)]
                    choice = planner.best_schedule(costs, links, count)
                    rows += [("wan", None), (choice.schedule, choice.warmup)]
                    case = {"rows": rows, "width": width, "micro_batches": count, "repeats": repeats, "real": kind == "real"}
                    result = run(net.hosts, case)
                    if result["compute"] is not None:
                        forward, backward = zip(*result["compute"], strict=True)
                        cores = len(os.sched_getaffinity(0))  # which the stages share
                        costs = planner.Costs(forward, backward, (0.0,) * stages, message, message, cores=cores)
                    best = planner.best_schedule(costs, links, count).makespan
                    least = planner.bound(costs, links, count)
                    for (name, warmup), row in zip(rows, result["rows"], strict=True):
                        shown = f"{name} {warmup}" if warmup else name
                        print(
                            f"{kind:>7} {label:>8} {count:>3} {shown:>16} {row['makespan']:>9.3f} {least:>6.3f} {best:>6.3f} "
                            f"{row['makespan'] / best:>7.2f} {row.get('step', float('nan')):>6.3f}",
                            flush=True,
                        )
        print(f"\nemulator: {net.emulator_cpu():.0%} of a core on average")


def depth(link: str, repeats: int) -> None:
    """Step time against the number of stages: what grows is fill and drain."""
    from thinpipe.lab import lab, parse_links

    print(f"{link}, 64 KiB, 8 micro-batches, compute sleeps\n\n{'stages':>6} {'step':>7} {'planned':>8} {'bound':>7}", flush=True)
    for stages in (2, 4, 8, 16):
        links = parse_links(link, stages - 1)
        costs = planner.Costs.uniform(stages, FORWARD, BACKWARD, TOKENS * 64 * 2)
        choice = planner.best_schedule(costs, links, 8)
        case = {"rows": [(choice.schedule, choice.warmup)], "width": 64, "micro_batches": 8, "repeats": repeats, "real": False}
        with lab(links, hosts=stages) as net:
            result = run(net.hosts, case)["rows"][0]
        planned = planner.simulate(schedule.actions(choice.schedule, stages, 8, choice.warmup), costs, links)
        least = planner.bound(costs, links, 8)
        print(f"{stages:>6} {result['step']:>7.3f} {planned.seconds_per_step:>8.3f} {least:>7.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="80mbit,25ms")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compute", nargs="+", choices=["sleep", "real"], default=["sleep", "real"])
    parser.add_argument("--depth", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
    elif arguments.depth:
        depth(arguments.link, arguments.repeats)
    else:
        compare(arguments.link, arguments.micro_batches, arguments.repeats, arguments.stages, arguments.compute)


if __name__ == "__main__":
    main()
