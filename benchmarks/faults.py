"""A run of four machines under attack, in the lab: what each fault costs, and that it costs nothing else.

    python benchmarks/faults.py [--only CASE ...] [--repeat N] [--out runs/faults]   # needs the lab: root or unshare -rmn
    python benchmarks/faults.py --only "one of each" --repeat 30                     # no flake

Four hosts over 80 Mbit/s and 10 ms one way train one stage each. Whoever's command dies is started again after a second, as a
service manager would. Results are kept in --out as they come; a case whose result is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from thinpipe import faults
from thinpipe.config import dump, from_dict
from thinpipe.faults import Fault
from thinpipe.lab import Lab, lab, parse_links
from thinpipe.metrics import read_events, write_whole
from thinpipe.trial import train_on

HOSTS, STEPS, LINK, TIMEOUT = 4, 150, "80mbit,10ms", 10.0
_LOST = re.compile(r"lost the connection to|heard nothing|can't reach")
_LONGEST = 900  # seconds that a case may take


@dataclass
class Machine:
    """A host's command, started again when it is killed; what it said, and when."""

    number: int
    command: list[str]
    env: dict[str, str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True).start()

    def _listen(self, stream: Any) -> None:
        for line in stream:
            self.lines.append((time.time(), line.rstrip()))

    def first(self, pattern: str | re.Pattern[str], after: float) -> float | None:
        return next((when for when, line in self.lines if when >= after and re.search(pattern, line)), None)


def config(folder: Path) -> Path:
    groups = {
        "model": {"width": 64, "layers": 8, "heads": 2, "hidden": 160, "context": 64},
        "data": {"vocab": 512},
        "compression": {"rank": 8, "move_every": 7, "segments": HOSTS},
        "pipeline": {"stages": HOSTS, "micro_batches": 4},
        "train": {"steps": STEPS, "batch": 4, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 10, "watch_every": 0, "sample": ""},
        "network": {"timeout": TIMEOUT},
    }
    path = folder / "config.toml"
    path.write_text(dump(from_dict(groups)))
    return path


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "metrics.jsonl") if event["event"] == "step"]


def undisturbed(out: Path) -> list[float]:
    """The losses of the run that nobody attacks."""
    if not (out / "undisturbed/result.json").exists():
        command = [sys.executable, "-m", "thinpipe", "train", str(config(out)), "--run.dir", str(out / "undisturbed")]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=600)
    return losses(out / "undisturbed")


def attack(
    out: Path, name: str, planned: list[Fault], act: Callable[[Lab, list[Machine], Path], list[float]] | None = None
) -> dict[str, Any]:
    """Train with the faults inside the stages, and `act` from outside, which returns when it did what it does.

    Returns the figures of every fault and of the run.
    """
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run, plan = folder / "run", folder / "faults.json"
    faults.write(plan, planned)
    toml = config(folder)
    with lab(parse_links(LINK, HOSTS - 1, "LINK"), HOSTS) as net:
        machines = []
        for i in range(HOSTS):
            command = train_on(net.hosts, i, toml, run)
            env = os.environ | {"OMP_NUM_THREADS": "1", faults.VARIABLE: str(plan)}
            machines.append(Machine(i, command, env))
            machines[i].start()
        outside: list[float] = []
        acting = threading.Thread(target=lambda: outside.extend(act(net, machines, run) if act else []), daemon=True)
        acting.start()
        deadline, started_again = time.monotonic() + _LONGEST, 0
        try:
            while any(machine.process is None or machine.process.poll() != 0 for machine in machines):
                for machine in machines:
                    assert machine.process is not None
                    if machine.process.poll() not in (None, 0):
                        time.sleep(1.0)
                        started_again += 1
                        machine.start()
                if time.monotonic() > deadline:
                    return {"hung": True, "said": [line for machine in machines for _, line in machine.lines[-4:]]}
                time.sleep(0.1)
        finally:
            for machine in machines:
                if machine.process is not None and machine.process.poll() is None:
                    os.killpg(machine.process.pid, signal.SIGKILL)
    fired = sorted([*faults.happened(plan).values(), *((when, None) for when in outside)])
    ends = [*(when for when, _ in fired[1:]), float("inf")]
    return {
        "faults": [figures(machines, when, step, until) for (when, step), until in zip(fired, ends, strict=True)],
        "equal": losses(run) == undisturbed(out),
        "loss": losses(run)[-1],
        "commands_started_again": started_again,
        "said": [line for _, line in machines[0].lines if "refused" in line or "not saved" in line],
    }


def figures(machines: list[Machine], when: float, step: int | None, until: float) -> dict[str, Any]:
    """What the fault at time `when`, in `step`, did until the next one: seconds after it, None where nothing was said."""
    told = [at for machine in machines if (at := machine.first(_LOST, when)) is not None and at < until]
    first = machines[0]
    begun, resumed = first.first("starting again", when), first.first(r"resumed from step|training begins anew", when)
    again = None if resumed is None or resumed >= until else first.first(r"^step [0-9]+ ", resumed)
    line = next((line for at, line in first.lines if at == resumed), "") if again is not None else ""
    begins = int(found[1]) if (found := re.search("resumed from step ([0-9]+)", line)) else 0
    return {
        "neighbour": min(told) - when if told else None,
        "everyone": max(told) - when if told else None,
        "stages_that_told": len(told),
        "again": again - when if again is not None else None,
        "start": again - begun if again is not None and begun is not None and begun < again else None,
        "steps_lost": step - 1 - begins if again is not None and step is not None else None,
    }


# From outside


def reach(run: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while (
        time.monotonic() < deadline
        and max((e["step"] for e in read_events(run / "metrics.jsonl") if e["event"] == "step"), default=0) < step
    ):
        time.sleep(0.05)


def cut(host: int, seconds: float) -> Callable[[Lab, list[Machine], Path], list[float]]:
    def act(net: Lab, machines: list[Machine], run: Path) -> list[float]:
        reach(run, 40)
        when = time.time()
        net.cut(host)
        time.sleep(seconds)
        net.restore(host)
        return [when]

    return act


def kill_command(host: int) -> Callable[[Lab, list[Machine], Path], list[float]]:
    def act(net: Lab, machines: list[Machine], run: Path) -> list[float]:
        reach(run, 40)
        process = machines[host].process
        assert process is not None
        process.kill()
        return [time.time()]

    return act


def fill_disk(net: Lab, machines: list[Machine], run: Path) -> list[float]:
    reach(run, 40)
    when = time.time()
    with faults.fill(run, most=256 << 20):
        reach(run, 75)
    return [when]


def cases() -> dict[str, tuple[list[Fault], Callable[[Lab, list[Machine], Path], list[float]] | None]]:
    found: dict[str, tuple[list[Fault], Any]] = {}
    for seed in range(4):
        drawn = faults.draw(seed, 14, HOSTS, range(12, STEPS - 1, 4))
        found[f"15 kills, seed {seed}"] = ([*drawn, Fault(what="kill", stage=seed, step=STEPS, at="end")], None)
    found["frozen"] = ([Fault(what="stop", stage=1, step=40, at="backward")], None)
    found["network cut for 5 s"] = ([], cut(2, 5.0))
    found["network cut for 60 s"] = ([], cut(2, 60.0))
    found["command killed"] = ([], kill_command(2))
    found["meeting's host killed"] = ([], kill_command(0))
    one = [Fault(what="kill", stage=2, step=20, at="backward"), Fault(what="stop", stage=1, step=60, at="forward")]
    found["one of each"] = (
        [*one, Fault(what="kill", stage=0, step=100, at="save"), Fault(what="delay", stage=3, step=120, seconds=3.0)],
        None,
    )
    found["NaN"] = ([Fault(what="poison", stage=1, step=40)], None)
    found["disk full"] = ([], fill_disk)
    return found


def with_small_disk(out: Path, name: str, *rest: Any) -> dict[str, Any]:
    """The case on a disk of 24 MB of its own."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    disk = out / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "thinpipe-faults", disk], check=True)
    try:
        if not (disk / "undisturbed").exists():
            (disk / "undisturbed").symlink_to((out / "undisturbed").resolve())
        return attack(disk, name, *rest)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def row(name: str, result: dict[str, Any]) -> str:
    if result.get("hung"):
        return f"| {name} | **hung** | | | | | | |"
    told = [fault for fault in result["faults"] if fault["neighbour"] is not None]

    def span(key: str, form: str = ".1f") -> str:
        found = [fault[key] for fault in result["faults"] if fault[key] is not None]
        return f"{median(found):{form}} ({max(found):{form}})" if found else "–"

    return (
        f"| {name} | {len(result['faults'])} | {span('neighbour')} | {span('everyone')} | {span('again')} | {span('start')} | "
        f"{span('steps_lost', '.0f')} | "
        f"{'equal' if result['equal'] else format(result['loss'], '.4f')} |" + ("" if told or "kill" not in name else " nobody noticed |")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/faults")
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--repeat", type=int, default=1, help="run every case so often, whatever is there")
    arguments = parser.parse_args()
    out, all_cases = Path(arguments.out).resolve(), cases()
    if unknown := set(arguments.only or []) - set(all_cases):
        parser.error(f"no case {', '.join(unknown)}; there are: {'; '.join(all_cases)}")
    out.mkdir(parents=True, exist_ok=True)
    print(f"undisturbed: loss {undisturbed(out)[-1]:.4f}", flush=True)
    print("medians, and the worst in brackets; seconds after the fault")
    heads = ["fault", "times", "neighbour notices", "all notice", "trains again", "of it start", "steps lost", "final loss"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for turn in range(arguments.repeat):
        for name in arguments.only or all_cases:
            stored = out / f"{name}{f' {turn}' * (turn > 0)}.json"
            if arguments.repeat > 1 or not stored.exists():
                run = with_small_disk if name == "disk full" else attack
                write_whole(stored, json.dumps(run(out, name, *all_cases[name]), indent=1))
            print(row(name, json.loads(stored.read_text())), flush=True)


if __name__ == "__main__":
    main()
