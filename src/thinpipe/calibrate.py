"""What a stage's compute costs on this machine, measured while all stages compute at once, as the planner takes it."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from . import launch
from .config import Config
from .data import prepare
from .device import pick_device, share_cores, use_bf16
from .linkrate import measure_links
from .metrics import to_json, write_whole
from .model import Stage, build_stages
from .optim import Optimizer
from .pipeline import Pipeline
from .planner import (
    GPU,
    Choice,
    Costs,
    at_least_possible,
    best_schedule,
    chain,
    find_gpu,
    in_flight_limits,
    message_bytes,
    tied_bytes_per_step,
)
from .run import open_run
from .tally import Tally
from .topology import Topology

_COSTS = "costs.json"


def measure_costs(stage: Stage, here: Topology, config: Config, optimizer: Optimizer | None = None, seconds: float = 1.5) -> Costs:
    """Time a micro-batch's forward and backward on every stage, each for `seconds` at the same time. COLLECTIVE.

    Stages that share one machine's cores are timed by the core-seconds that they take, and the planner shares the cores out.
    What a whole step takes of a core beyond that, for messages above all, counts as part of its forwards and backwards.

    Works on random tokens and coordinates; leaves no gradients behind.

    Args:
        optimizer: timed as well, in a few steps, which changes the weights (None: it and the messages count as free).
    """
    forward, backward = time_passes(stage, here, config.micro_batch, seconds)
    optimizing = 0.0
    if optimizer is not None:
        whole, optimizing = _time_steps(stage, here, config, optimizer, seconds)
        if _shares_cores(stage, here):  # elsewhere messages pass while the device computes
            passes = config.pipeline.micro_batches * (forward + backward)
            more = max(1.0, (whole - optimizing) / passes)
            forward, backward = more * forward, more * backward
    stage.zero_grad()
    everyone = here.gather([forward, backward, optimizing])
    forward_bytes, backward_bytes = message_bytes(config)
    return Costs(
        forward=tuple(f for f, _, _ in everyone),
        backward=tuple(b for _, b, _ in everyone),
        optimizer=tuple(o for _, _, o in everyone),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        tied_bytes=tied_bytes_per_step(config, stage.spec) // 2 if here.stages > 1 else 0,
        cores=len(os.sched_getaffinity(0)) if _shares_cores(stage, here) else None,
    )


def time_passes(stage: Stage, here: Topology, micro_batch: int, seconds: float) -> tuple[float, float]:
    """Median seconds of a forward and of a backward, with what the codec does at the cuts."""
    spec, codec, device = stage.spec, stage.codec, stage.device
    tokens_BS = torch.randint(spec.vocab, (micro_batch, spec.context + 1))
    c_BTW = torch.randn(micro_batch, spec.context, stage.method.wire_width)
    wire = codec.encode(c_BTW)
    forwards: list[float] = []
    backwards: list[float] = []
    here.gather(0)  # all begin together
    began = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=stage.bf16):
        while time.perf_counter() - began < seconds or len(forwards) < 4:
            start = _now(device)
            c = None if stage.is_first else codec.decode(wire.to(device), stage.dtype).requires_grad_()
            out = stage(c, tokens_BS)
            if not stage.is_last:
                codec.encode(out.detach()).cpu()
            turn = _now(device)
            torch.autograd.backward(out, None if stage.is_last else codec.decode_gradient(wire.to(device), out.dtype))
            if c is not None:
                assert c.grad is not None
                codec.encode_gradient(c.grad, codec.places(wire.to(device))).cpu()
            forwards.append(turn - start)
            backwards.append(_now(device) - turn)
    return median(forwards[1:]), median(backwards[1:])


def _time_steps(stage: Stage, here: Topology, config: Config, optimizer: Optimizer, seconds: float) -> tuple[float, float]:
    """Median seconds of a whole step and of the optimizer's part of it. COLLECTIVE."""
    pipeline = Pipeline(stage, here, config.pipeline, config.micro_batch)
    tokens_BS = None if stage.receives_ids else torch.randint(stage.spec.vocab, (config.share, stage.spec.context + 1))
    whole: list[float] = []
    optimizing: list[float] = []
    began, total = time.perf_counter(), Tally()
    while total.stop < here.stages:
        start = _now(stage.device)
        optimizer.zero_grad()
        pipeline.step(tokens_BS)
        total = pipeline.tally(Tally(stop=float(len(whole) >= 4 and time.perf_counter() - began > seconds)))
        turn = _now(stage.device)
        optimizer.step(1e-4, scale=0.5)
        whole.append(_now(stage.device) - start)
        optimizing.append(_now(stage.device) - turn)
    return median(whole[1:]), median(optimizing[1:])


def _shares_cores(stage: Stage, here: Topology) -> bool:
    """Whether all stages compute on this machine's cores, one each."""
    return stage.device.type == "cpu" and here.local_world == here.stages > 1 and hasattr(os, "sched_getaffinity")


def _now(device: torch.device) -> float:
    """Seconds; of this process's one core where it has no more, so that waiting for it behind other stages doesn't count."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def calibrate(config: Config, debug: bool = False, shared: bool = False) -> Costs:
    """Costs of a run's stages, measured with all of them on this machine at once and joined by its loopback.

    Args:
        shared: the run's stages will share this machine's cores too, as a lab's do; else each has a machine of its own.

    Raises ThinpipeError as training would.
    """
    with tempfile.TemporaryDirectory(prefix="thinpipe-calibrate-") as scratch:
        opened, folder, _ = open_run(replace(config, run=replace(config.run, dir=f"{scratch}/run")))
        prepare(opened)
        launch.start("calibrate", folder, opened.pipeline.stages, debug)
        stored: dict[str, Any] = json.loads((folder / _COSTS).read_text(encoding="utf-8"))
    costs: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    return Costs(**costs if shared else costs | {"cores": None})


def calibrate_stage(config: Config, here: Topology, folder: Path) -> None:
    """One worker's part of `calibrate`."""
    share_cores(here)
    (stage,) = build_stages(config, prepare(config).vocab, [here.stage])
    device = pick_device(config.run.device, here.local_rank)
    stage.to(device)
    stage.bf16 = use_bf16(config.run.precision, device)
    costs: dict[str, Any] = asdict(measure_costs(stage, here, config, Optimizer(stage.roles(), config.optim, stage.spec.width)))
    if here.is_first:
        write_whole(folder / _COSTS, to_json(costs))


def choose_schedule(stage: Stage, here: Topology, config: Config) -> Choice:
    """What `schedule = "auto"` stands for here and now: from measured compute, links and free memory. COLLECTIVE.

    Gradients are summed in the same order by every schedule, so that the choice changes no number of the training.
    """
    costs = measure_costs(stage, here, config, seconds=0.5)
    found = measure_links(here, 0.2, [(s, s + 1) for s in range(here.stages - 1)])
    mine = in_flight_limits(config, stage.spec.vocab, _this_machine(stage, here))[here.stage]
    links = chain(found, range(here.stages), here.stages) if here.stages > 1 else ()
    # The machine that measured slightly more must not choose something else: the first one chooses.
    limits = at_least_possible(here.gather(mine), config.pipeline.micro_batches)
    choice = best_schedule(costs, links, config.pipeline.micro_batches, limits)
    return Choice(*here.gather(list(choice))[0])


def _this_machine(stage: Stage, here: Topology) -> GPU:
    """A GPU of the memory that this stage may fill: what is free, and what it has filled already, which the planner counts too."""
    if stage.device.type == "cuda":
        memory = torch.cuda.mem_get_info(stage.device)[0] + torch.cuda.memory_reserved(stage.device)
    else:
        memory = _available() // here.local_world + sum(t.nbytes for t in (*stage.parameters(), *stage.buffers()))
    return replace(find_gpu("cpu"), memory_gb=memory / 1e9, bf16=1.0 if stage.bf16 else None, fixed_gb=0.0)


def _available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that processes can still have; Linux counts the page cache, which gives way, among them."""
    if meminfo.is_file() and (found := re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)):
        return 1024 * int(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
