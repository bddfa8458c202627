"""The learning rate at which an arm of `hirank bench pretrain` did best in short runs.

    python benchmarks/best_lr.py RESULTS ARM STEPS     prints --lr 0.01, or --adamw-lr 0.0025

RESULTS is a folder of results: of its runs of ARM with STEPS steps on a GPU the lowest held-out
loss counts.
"""

import json
import sys
from pathlib import Path


def main(folder: str, arm: str, steps: str) -> str:
    """The option to hand on."""
    files = Path(folder).glob("nvidia*/pretrain.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    name = "adamw_lr" if arm == "adamw" else "lr"
    runs = [
        (row["metrics"]["eval_loss"], row["settings"][name])
        for row in rows
        if row["arm"] == arm and row["settings"]["steps"] == int(steps)
    ]
    runs = [run for run in runs if run[0] == run[0]]  # without those that ended in NaN
    if not runs:
        raise SystemExit(f"{folder} has no run of {arm} with {steps} steps: sweep first.")
    return f"--{name.replace('_', '-')} {min(runs)[1]:g}"


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
