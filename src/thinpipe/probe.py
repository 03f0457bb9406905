"""`thinpipe probe`: the links between the machines of a run and their speeds, and what to make of them. One process per machine joins."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import launch
from .calibrate import time_passes
from .config import Config, ThinpipeError, dump, to_dict
from .data import expected_vocab
from .device import pick_device, share_cores, use_bf16
from .lab import Measured
from .linkrate import measure_links, rounds
from .meeting import meeting
from .metrics import write_whole
from .model import build_stages
from .planner import balance, find_gpu, recommend, stage_sizes
from .topology import Topology

_ALIKE = 1.15  # machines' speeds closer than this are equal


def probe(config: Config, say: Callable[[str], None] = print, debug: bool = False) -> dict[str, Any]:
    """Measure together with the run's other machines, where the same is called.

    Returns the keys of `thinpipe probe --json` (docs/probe.md).

    Raises ThinpipeError: no meeting is given, the machines did not meet, or one was lost.
    """
    config, network = config.check(), config.network
    if network.rdzv is None or network.needed < 2:
        raise ThinpipeError(
            "probe measures the links between machines: give --network.rdzv HOST:PORT (an address of one of them) "
            "and --network.nodes N, 2 at least, on each of them"
        )
    gpu, vocab = find_gpu(config.plan.gpu), expected_vocab(config)
    config.spec(vocab)
    say(f"{network.needed} machines, once all are there: a few seconds for each of {len(rounds(network.needed))} rounds of pairs")
    met = meeting(network, f"thinpipe-probe-{config.run.name}", say=say)
    with tempfile.TemporaryDirectory(prefix="thinpipe-probe-") as scratch:
        folder = Path(scratch)
        write_whole(folder / "config.toml", dump(config))
        launch.start("probe", folder, 1, debug, arguments=[met.address], meeting=met)
        if not (folder / "probe.json").exists():
            raise ThinpipeError("this machine was a spare, and was not needed: the others have measured (network.nodes)")
        seen: dict[str, Any] = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
    matrix: list[list[Measured | None]] = [[None] * network.needed for _ in range(network.needed)]
    for link in seen["links"]:
        matrix[link["from"]][link["to"]] = Measured(link["mbit"], link["round_trip_ms"])
    advice = recommend(matrix, config, vocab, gpu)
    return seen | {
        "order": list(advice.order),
        "rank": advice.rank,
        "layers": layers_for([seen["machines"][i]["layer_seconds"] for i in advice.order], config, vocab),
        "seconds_per_step": {"present": advice.present, "reordered": advice.reordered, "recommended": advice.recommended},
    }


def layers_for(seconds: Sequence[float], config: Config, vocab: int) -> list[int] | None:
    """Layers of each segment where machines differ in speed, in the order of their places; None where even shares do.

    Args:
        seconds: of a layer on each machine.
    """
    stages, layers = config.pipeline.stages, int(config.sizes()["layers"])
    if max(seconds) <= _ALIKE * min(seconds) or config.segments != stages:
        return None
    spec = config.spec(vocab)
    block = 4 * spec.width**2 + 3 * spec.width * spec.hidden  # multiply-adds a token, about; a head has vocab x width
    share = stages // len(seconds)
    per_stage = [each for each in seconds for _ in range(share)]
    sizes = [stage_sizes(config, spec, stage) for stage in range(stages)]
    return list(balance(per_stage, layers, [s * (size.head + size.scored) / block for s, size in zip(per_stage, sizes, strict=True)]))


def _layer_seconds(config: Config, here: Topology, vocab: int) -> float:
    """Forward and backward of a micro-batch through one layer on this machine, all machines at once. COLLECTIVE."""
    share_cores(here)
    three = replace(
        config,
        model=replace(config.model, layers=3),
        compression=replace(config.compression, segments=3, stage_table=0, local_loss=0.0),  # which are a segment's, not a layer's
        pipeline=replace(config.pipeline, stages=3, layers_per_segment=()),
    )
    (stage,) = build_stages(three, vocab, [1])  # neither embeds nor has the head
    device = pick_device(config.run.device, here.local_rank)
    stage.to(device)
    stage.bf16 = use_bf16(config.run.precision, device)
    return sum(time_passes(stage, here, config.micro_batch, 1.0))


def probe_machine(config: Config, here: Topology, address: str) -> dict[str, Any]:
    """This machine's part, in a process of its own: who takes part, this one's number, and all links. COLLECTIVE."""
    # What is recommended is worked out on every machine.
    groups = to_dict(config)
    planned = [groups[group] for group in ("model", "compression", "pipeline", "plan")]
    here.require_equal("the config", [*planned, config.train.batch], "start all with the same CONFIG and options")
    vocab = expected_vocab(config)
    mine = {"host": here.host, "address": address, "layer_seconds": _layer_seconds(config, here, vocab)}
    machines = here.gather(mine)
    links = [
        {"from": i, "to": j, "mbit": link.rate, "round_trip_ms": link.round_trip}
        for i, row in enumerate(measure_links(here))
        for j, link in enumerate(row)
        if link is not None
    ]
    return {"machines": machines, "here": here.stage, "links": links}


def describe(result: dict[str, Any]) -> str:
    """What `probe` returned, for people."""
    machines, order, seconds = result["machines"], result["order"], result["seconds_per_step"]
    slow = statistics.median(link["mbit"] for link in result["links"]) / 2
    cells = {(link["from"], link["to"]): link for link in result["links"]}

    def cell(i: int, j: int) -> str:
        if (link := cells.get((i, j))) is None:
            return "-"
        return f"{'*' if link['mbit'] < slow else ''}{link['mbit']:.3g} / {link['round_trip_ms']:.3g}"

    numbers = range(len(machines))
    names = [f"{i}  {machine['address']} {machine['host']}" for i, machine in enumerate(machines)]
    wide = max(len(name) for name in names)
    lines = ["Mbit/s / ms there and back, from the machine of the row to that of the column (*: under half of the median rate)"]
    lines += [" " * wide + "".join(f"{j:>16}" for j in numbers)]
    lines += [f"{names[i]:{wide}}" + "".join(f"{cell(i, j):>16}" for j in numbers) for i in numbers]
    lines += ["", f"step, predicted: {seconds['present']:.3g} s as the machines stand"]
    if order == list(numbers):
        lines += ["order: leave it as it is"]
    else:
        lines[-1] += f", {seconds['reordered']:.3g} s in this order:"
        for place, i in enumerate(order):
            lines += [f"  {names[i]:{wide}}  --network.node_rank {place}{'  (this machine)' if i == result['here'] else ''}"]
    if result["rank"] is not None:
        lines += [f"rank that hides behind compute: --compression.rank {result['rank']} ({seconds['recommended']:.3g} s a step)"]
    if result["layers"] is not None:
        speeds = ", ".join(f"{1e3 * machines[i]['layer_seconds']:.3g}" for i in order)
        lines += [
            f"machines differ in speed ({speeds} ms a layer and micro-batch, in that order): "
            f"--pipeline.layers-per-segment {' '.join(map(str, result['layers']))}"
        ]
    return "\n".join(lines)
