"""Replicas: the same loss and more speed, kills, and averages that are far apart. Each part prints a table.

python benchmarks/replicas.py scale            # 1, 2 and 4 replicas with one global batch; compute emulated; needs the lab
python benchmarks/replicas.py kills [--kills 30] [--seed 0]     # 2 replicas of 2 stages on this machine, killed at random
python benchmarks/replicas.py apart            # 2 replicas over 20 Mbit/s: every step, every H steps, int8; needs the lab
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from thinpipe import faults
from thinpipe.config import dump, from_dict
from thinpipe.faults import MOMENTS, Fault
from thinpipe.metrics import read_events

SMALL: dict[str, dict[str, Any]] = {
    "model": {"width": 64, "layers": 4, "heads": 2, "hidden": 160, "context": 64},
    "data": {"vocab": 512},
    "compression": {"rank": 8, "move_every": 10, "segments": 2},
    "pipeline": {"stages": 2},
    "train": {"eval_every": 0, "eval_batches": 4, "checkpoint_every": 0, "watch_every": 0, "sample": ""},
}


def settings(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    groups = {group: SMALL.get(group, {}) | changes.get(group, {}) for group in {*SMALL, *changes}}
    path = folder / f"{name}.toml"
    path.write_text(dump(from_dict(groups).check()))
    return path


def thinpipe(*arguments: str, planned: Path | None = None) -> dict[str, Any]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({faults.VARIABLE: str(planned)} if planned else {})
    command = [sys.executable, "-m", "thinpipe", *arguments, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "metrics.jsonl") if event["event"] == "step"]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors but the statistic, of which each replica has its own share since the last move."""
    tensors = {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in tensors.items() if name not in ("basis/M", "basis/square_norm")}


def scale(folder: Path, link: str) -> None:
    """One batch of 16 micro-batches of one sequence, shared by the replicas."""
    forward, backward, replicas = 0.03, 0.06, (1, 2, 4)
    slow = [
        Fault(what="slow", stage=stage, replica=replica, step=1, at=at, seconds=seconds)
        for stage in range(2)
        for replica in range(max(replicas))
        for at, seconds in (("forward", forward), ("backward", backward))
    ]
    print(f"2 stages a replica, batch 16, {link}, {forward:g} and {backward:g} s emulated per micro-batch, 30 steps\n")
    print("| replicas | s per step | tokens/s | times one | largest difference of a loss | validation loss |\n|---|---|---|---|---|---|")
    first: list[float] = []
    alone = 0.0
    for count in replicas:
        faults.write(folder / "slow.json", slow)
        pipeline = {"stages": 2, "replicas": count, "micro_batches": 16 // count}
        toml = settings(folder, f"scale-{count}", pipeline=pipeline, train={**SMALL["train"], "steps": 30, "batch": 16})
        run = folder / f"scale-{count}"
        result = thinpipe("lab", str(toml), "--link", link, "--run.dir", str(run), planned=folder / "slow.json")
        losses = [event["loss"] for event in steps_of(run)]
        first, alone = first or losses, alone or result["tokens_per_s"]
        worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, first, strict=True))
        print(
            f"| {count} | {result['seconds_per_step']:.3f} | {result['tokens_per_s']:.0f} | {result['tokens_per_s'] / alone:.2f} "
            f"| {worst:.1e} | {result['val_loss']:.5f} |",
            flush=True,
        )


def kills(folder: Path, count: int, seed: int) -> None:
    """One kill in every hundred steps, in turn in all four processes, so that the one before is back."""
    drawn, apart = random.Random(seed), 100
    who = [divmod(i % 4, 2) for i in range(count)]
    drawn.shuffle(who)
    planned = [
        Fault(what="kill", replica=replica, stage=stage, step=30 + apart * i + drawn.randrange(apart // 2), at=drawn.choice(MOMENTS))
        for i, (replica, stage) in enumerate(who)
    ]
    faults.write(folder / "kills.json", planned)
    train = {**SMALL["train"], "steps": 30 + apart * count, "batch": 8, "checkpoint_every": 10}
    toml = settings(folder, "kills", pipeline={"stages": 2, "replicas": 2, "micro_batches": 2}, train=train)
    run = folder / "kills"
    result = thinpipe("train", str(toml), "--run.dir", str(run), planned=folder / "kills.json")
    steps = {replica: steps_of(run / "replicas" / str(replica) if replica else run) for replica in range(2)}
    gaps, back = [], []
    for number, (when, _) in faults.happened(folder / "kills.json").items():
        others = steps[1 - planned[number].replica]
        after = [event for event in others if event["time"] > when]
        before = [event for event in others if event["time"] <= when]
        around = [*before[-1:], *(event for event in after if event["time"] < when + 15)]
        gaps.append(max((b["time"] - a["time"] for a, b in itertools.pairwise(around)), default=0.0))
        without = next((event["time"] for event in after if event["replicas"] == 1), None)
        if without is not None:
            again = next((event["time"] for event in after if event["time"] > without and event["replicas"] == 2), None)
            if again is not None:
                back.append(again - when)
    members = {event["step"]: event["replicas"] for replica in steps for event in steps[replica]}
    counted = sum(members.values()) * 4 * 64
    ours, theirs = (weights(folder / "checkpoints" / f"step-{result['steps']:08}") for folder in (run, run / "replicas/1"))
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    print(f"{len(gaps)} kills of {count} planned in {result['steps']} steps")
    print(f"the other pipeline's longest pause: median {median(gaps):.1f} s, worst {max(gaps):.1f} s")
    seen = f"median {median(back):.1f} s, worst {max(back):.1f} s" if back else "never"
    print(f"back in the average after: {seen} ({len(back)} of {len(gaps)} seen)")
    print(f"weights, moments and basis of both replicas at the end: {'equal' if same else 'DIFFERENT'} bit for bit")
    single = list(members.values()).count(1)
    print(f"tokens by the run's count {result['tokens']}, by the events of all steps {counted}; {single} steps with one replica")


def apart(folder: Path, link: str) -> None:
    """Two replicas of one stage."""
    model = {"width": 128, "layers": 4, "heads": 4, "hidden": 336, "context": 128}
    rows: dict[str, dict[str, dict[str, Any]]] = {
        "one replica": {},
        "every step": {"pipeline": {"replicas": 2}},
        "every step, rank 4 (PowerSGD)": {"pipeline": {"replicas": 2}, "average": {"rank": 4}},
        "every 10 steps": {"pipeline": {"replicas": 2}, "average": {"every": 10}},
        "every 10 steps, int8": {"pipeline": {"replicas": 2}, "average": {"every": 10, "wire": "int8"}},
        "every 50 steps, int8": {"pipeline": {"replicas": 2}, "average": {"every": 50, "wire": "int8"}},
    }
    print(f"2 replicas of one stage, dense, {link}, batch 16 of 128 tokens in all, 200 steps\n")
    print("| averaged | MB a replica sends per step | s per step | whole run, s | validation loss |\n|---|---|---|---|---|")
    for name, changes in rows.items():
        train = {**SMALL["train"], "steps": 200, "batch": 16, "eval_batches": 16}
        pipeline = {"stages": 1, "micro_batches": 1} | changes.get("pipeline", {})
        slug = "".join(sign if sign.isalnum() else "-" for sign in name)
        options = {"model": model, "compression": {"method": "none", "segments": 1}, "data": {"vocab": 1024}, "train": train}
        toml = settings(folder, slug, **options, pipeline=pipeline, average=changes.get("average", {}), optim={"lr": 3e-3, "warmup": 20})
        result = thinpipe("lab", str(toml), "--link", link, "--run.dir", str(folder / slug))
        events = steps_of(folder / slug)
        # An average behind a step shows in the next step's event, the last one's nowhere.
        sent = sum(event.get("average_bytes", 0) for event in events) / (len(events) - changes.get("average", {}).get("every", 0))
        whole = events[-1]["time"] - events[0]["time"]
        print(f"| {name} | {sent / 1e6:.3f} | {result['seconds_per_step']:.2f} | {whole:.0f} | {result['val_loss']:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["scale", "kills", "apart"])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.part == "scale":
            scale(folder, "80mbit,10ms")
        elif arguments.part == "kills":
            kills(folder, arguments.kills, arguments.seed)
        else:
            apart(folder, "20mbit,10ms")


if __name__ == "__main__":
    main()
