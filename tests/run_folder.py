"""A run folder as a real run leaves it, made by a seeded script: for tests and for looking at.

`python tests/run_folder.py FOLDER` writes one, with its report and model card.
"""

import json
import math
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "model": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "auto"},
    "data": {"train": ["/data/orders/train.jsonl"], "eval": ["/data/orders/test.jsonl"]},
    "method": {"name": "dora", "r": 64, "alpha": 128.0, "dropout": 0.0, "accelerate": True},
    "optim": {"lr": 2e-4, "epochs": 1.0, "batch_size": 8, "grad_accum": 1, "scheduler": "cosine"},
    "eval": {"every": 0.1, "exact_match": True, "exact_match_rows": 100},
    "run": {"dir": None, "name": "orders"},
}
VERSIONS = {"python": "3.12.3", "torch": "2.13.0+cpu", "peft": "0.21.2", "device": "cpu"}
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
BEGAN = datetime(2026, 11, 29, 20, 11, tzinfo=UTC)


def layers(count: int = 30) -> list[dict[str, str]]:
    """Seven linears a block; the last block's down_proj is one that hirank leaves to PEFT."""
    rows = [
        {"name": f"model.layers.{block}.{part}", "kind": "dora", "tier": "eager", "reason": "cpu"}
        for block in range(count)
        for part in PARTS
    ]
    rows[-1] |= {"tier": "peft", "reason": "the adapter has a bias"}
    return rows


def samples() -> list[tuple[str, str, str, str]]:
    """(prompt, expected, before, after)."""
    ask = "<|im_start|>user\nTurn the order into JSON.\n{}<|im_end|>\n<|im_start|>assistant\n"
    rows = [
        ("Three boxes of blue pens to Oslo, please, by Friday.", "3", "blue pens", "Oslo", "3"),
        ("I'd like 12 green folders sent to Lima.", "12", "green folders", "Lima", "12"),
        ("Ship two red staplers to Riga next week.", "2", "red staplers", "Riga", "3"),
    ]
    form = '{{"item": "{}", "count": {}, "city": "{}"}}'
    before = 'Sure! Here is the order you asked for:\n\n```json\n{\n  "order": "..."\n}\n```'
    return [
        (ask.format(text), form.format(item, n, city), before, form.format(item, got, city))
        for text, n, item, city, got in rows
    ]


def events(steps: int = 160, every: int = 16, seed: int = 0) -> list[dict[str, Any]]:
    """A whole log: a start, a step a line, evaluations, samples before and after, an end."""
    rng = random.Random(seed)
    rows = [_start(), _eval(0, 3.1, 0.0), *_samples("before", 0)]
    for step in range(1, steps + 1):
        rows.append(_step(step, steps, rng))
        if step % every == 0:
            share = 1 / (1 + math.exp(-9 * (step / steps - 0.45)))
            rows.append(_eval(step, 0.16 + 2.9 * math.exp(-step / 28), round(0.86 * share, 2)))
    rows += [
        *_samples("after", steps),
        {"event": "end", "step": steps, "status": "finished", "best_step": steps},
    ]
    for number, row in enumerate(rows):
        row["time"] = (BEGAN + timedelta(seconds=1.6 * number)).isoformat(timespec="milliseconds")
    return rows


def write_run(folder: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    """Write `rows` and the settings as a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows)
    (folder / "log.jsonl").write_text("".join(lines), encoding="utf-8")
    settings = {part: values | config.get(part, {}) for part, values in CONFIG.items()}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (folder / "versions.json").write_text(json.dumps(VERSIONS))
    return folder


def _start() -> dict[str, Any]:
    counts = {"trainable_params": 19_757_376, "total_params": 154_272_384}
    sizes = {"n_train": 1280, "n_eval": 100, "tokens": 96_000}
    start = {"event": "start", "step": 0, "model": CONFIG["model"]["name"], "layers": layers()}
    return start | counts | sizes


def _eval(step: int, loss: float, share: float) -> dict[str, Any]:
    return {"event": "eval", "step": step, "eval_loss": loss, "exact_match": share, "n": 100}


def _samples(phase: str, step: int) -> list[dict[str, Any]]:
    column = 2 if phase == "before" else 3
    return [
        {
            "event": "sample",
            "step": step,
            "phase": phase,
            "prompt": row[0],
            "expected": row[1],
            "output": row[column],
        }
        for row in samples()
    ]


def _step(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    used = int(1.55e9 + 6e7 * rng.random())
    return {
        "event": "step",
        "step": step,
        "loss": (0.15 + 2.9 * math.exp(-step / 25)) * math.exp(rng.gauss(0, 0.18)),
        "lr": 2e-4 * min(step / 5, 1) * 0.5 * (1 + math.cos(math.pi * step / steps)),
        "grad_norm": (0.4 + 2 * math.exp(-step / 20)) * math.exp(rng.gauss(0, 0.25)),
        "tokens": 600 * step,
        "tokens_per_s": rng.gauss(410, 18),
        "memory_bytes": used,
        "peak_memory_bytes": int(1.72e9 if step > 3 else 1.66e9),
        "eta_s": 1.6 * (steps - step),
    }


if __name__ == "__main__":
    from hirank.train.card import write_card
    from hirank.train.report import write_report

    target = write_run(Path(sys.argv[1]), events())
    print(write_report(target), write_card(target))
