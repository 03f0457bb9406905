"""Runs of `thinpipe lab`, half of them killed: is anything left of namespaces, devices, firewall rules, processes?

python benchmarks/lab_leftovers.py [--runs 20] [--seed 0]   # needs the lab: root or unshare -rmn
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from thinpipe.config import dump, from_dict

_NAMES = {signal.SIGKILL: "kill -9", signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


def everything() -> dict[str, list[str]]:
    """What a lab could leave behind."""
    seen = {}
    for name, command in {
        "namespaces": "ip netns list",
        "devices": "ip -br link",
        "rules": "iptables-save",
        "mounts": "cat /proc/mounts",
    }.items():
        if shutil.which(command.split()[0]):
            lines = subprocess.run(command.split(), capture_output=True, text=True, timeout=30).stdout.splitlines()
            seen[name] = sorted(line for line in lines if not line.startswith("#"))
    seen["processes"] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "thinpipe" in text and __file__ not in text and "leftovers" not in text:
                seen["processes"].append(text.strip())
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    before, bad = everything(), 0
    model = {"width": 32, "layers": 2, "heads": 2, "hidden": 64, "context": 32}
    train = {"steps": 10, "batch": 4, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 3, "sample": ""}
    tiny = from_dict({"model": model, "compression": {"rank": 4}, "data": {"vocab": 300}, "pipeline": {"stages": 2}, "train": train})
    with tempfile.TemporaryDirectory() as scratch:
        toml = Path(scratch) / "tiny.toml"
        toml.write_text(dump(tiny))
        for number in range(arguments.runs):
            command = [sys.executable, "-m", "thinpipe", "lab", str(toml), "--link", "80mbit,5ms", "--run.dir", f"{scratch}/run-{number}"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            how, after = "to the end", 0.0
            if number % 2:
                kind, after = chance.choice(list(_NAMES)), chance.uniform(1, 30)
                how = _NAMES[kind]
                try:
                    process.wait(after)
                except subprocess.TimeoutExpired:
                    process.send_signal(kind)
            status = process.wait(120)
            end = time.monotonic() + 15
            while (left := {name: [x for x in now if x not in before[name]] for name, now in everything().items()}) and any(left.values()):
                if time.monotonic() > end:
                    break
                time.sleep(0.2)
            found = {name: rest for name, rest in left.items() if rest}
            bad += bool(found)
            print(f"run {number:2}: {how} after {after:4.1f} s, status {status}: {found or 'nothing left'}", flush=True)
    print(f"{bad} of {arguments.runs} runs left something behind")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
