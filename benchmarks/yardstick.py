"""Time to dense's final loss over links as thin, for their compute, as the public yardstick's (METHOD.md section 9).

    python benchmarks/yardstick.py [--seeds 1] [--timing planner] [--out runs/yardstick]   # resumable

There: 8 stages, 200 Mbit/s and 50 ms one way; a dense step takes 100.5 s, one of 6.4 times fewer bytes 19.9 s, and dense's loss comes
1.62 times sooner (2,925 against 9,125 steps). Here a small model's stage computes for milliseconds, so the link's rate and delay are
scaled to its compute.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

from learning import DOCS, SLOW, Groups, compressed, merged, packed, sizes

from thinpipe.calibrate import calibrate
from thinpipe.config import dump

STAGES, DENSE_STEP, SMALL_STEP, RATIO, DELAY = 8, 100.5, 19.9, 6.4, 0.05
WIDTH, TOKENS = 128, 1e6
ROWS: dict[str, Groups] = {
    "dense": compressed("none"),
    "subspace-6.4": compressed("subspace", 20) | SLOW,
    "best-8": packed("projected", WIDTH, 8),
    "best-32": packed("projected", WIDTH, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--timing", choices=("planner", "lab"), default="planner", help="planner: each stage on a machine of its own")
    parser.add_argument("--out", default="runs/yardstick")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    base = sizes(WIDTH, TOKENS)
    steps = base["train"]["steps"]
    cut: Groups = {
        "compression": {"segments": STAGES},
        "pipeline": {"stages": STAGES, "micro_batches": 8},
        "train": {"eval_every": steps // 24, "eval_batches": 16},
    }
    for name, groups in ROWS.items():
        (out / f"{name}.toml").write_text(dump(merged(base, groups, cut)))
    link_file = out / "link.txt"  # the same for a race that goes on
    if not link_file.exists():
        costs = [calibrate(merged(base, ROWS["dense"], cut)) for _ in range(5)]
        compute = 8 * median(sum(each.forward) + sum(each.backward) for each in costs) / STAGES  # seconds per stage and step
        messages = (DENSE_STEP - SMALL_STEP) / (1 - 1 / RATIO)
        theirs = DENSE_STEP - messages
        print(
            f"there: c + m = {DENSE_STEP}, c + m / {RATIO} = {SMALL_STEP}: m = {messages:.1f} s of messages, c = {theirs:.1f} s of compute"
        )
        sent = 2 * 2 * WIDTH * 16 * 128
        rate, delay = sent * 8 / (compute * messages / theirs), DELAY * compute / theirs
        print(
            f"here c = {compute:.4f} s per stage and step; {sent:,} bytes both ways take {messages / theirs:.1f} c "
            f"at {rate / 1e6:.2f} Mbit/s; the delay is {1e3 * delay:.3f} ms",
            flush=True,
        )
        link_file.write_text(f"{rate / 1e6:.2f}mbit,{1e3 * delay:.3f}ms")
    command = [sys.executable, "-m", "thinpipe", "race", *(str(out / f"{name}.toml") for name in ROWS)]
    command += ["--link", link_file.read_text(), "--extend", "3", "--seeds", str(arguments.seeds)]
    command += ["--timing", arguments.timing, "--out", str(out), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"target {result['target_loss']:.4f}, dense's final loss; link {link_file.read_text()}; step times from the {result['timed_by']}")
    print(
        "| run | fewer bytes | steps trained | final loss | steps to target | s per step | time to target | speed-up |\n" + "|---" * 8 + "|"
    )
    for row in result["rows"]:
        cells = [row["name"], f"{row['compression']:.3g}×", row["steps"], f"{row['final_val_loss']:.3f}"]
        reached = row["time_to_target"] is not None
        cells += [f"{row['steps_to_target']:.0f}" if reached else "missed", f"{row['seconds_per_step']:.4f}"]
        cells += [f"{row['time_to_target']:.0f} s", f"{row['speedup_vs_first']:.2f}"] if reached else ["", ""]
        print("| " + " | ".join(map(str, cells)) + " |")
    print("published: 1.62")
    shutil.copy(out / "race.json", DOCS / "yardstick.json")
    shutil.copy(out / "loss-seconds.png", DOCS / "yardstick.png")


if __name__ == "__main__":
    main()
