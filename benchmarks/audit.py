"""Time an audit of a large adapter from its files alone, and record it.

    python benchmarks/audit.py --folder /tmp/adapter [--rank 384] [--threads 2]

Writes an adapter of random numbers on all seven linears of Llama-3-8B's shape into FOLDER (2.0 GB
at rank 384, bf16; not made again if it is there), audits it in a process of its own as
`hirank audit` does, and adds a line to benchmarks/results/DEVICE/audit.jsonl. Delete FOLDER after.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from hirank.adapters.base_files import Entry, ShardWriter
from hirank.bench.record import append, device_facts, source_facts, version_facts

HERE = Path(__file__).resolve().parent
LAYERS, HIDDEN, FFN, KV = 32, 4096, 14336, 1024
SHAPES = {  # out, in
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    if not (given.folder / "adapter_config.json").is_file():
        write_adapter(given.folder, given.rank)
    torch.set_num_threads(given.threads)
    metrics = timed(given.folder, given.threads)
    record = {
        "suite": "audit",
        "arm": "adapter",
        "settings": {"model": "llama-3-8b", "rank": given.rank, "threads": given.threads},
        "metrics": metrics,
        "device": device_facts(torch.device("cpu")),
        "versions": version_facts(),
        **source_facts(None),
        "command": f"python benchmarks/audit.py --rank {given.rank} --threads {given.threads}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(metrics), append(given.out, "audit", [record]))


def write_adapter(folder: Path, rank: int) -> None:
    """A LoRA adapter in bf16; each tensor is drawn anew, so no two layers are alike."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number in range(LAYERS):
        for name, (n, k) in SHAPES.items():
            key = f"base_model.model.model.layers.{number}.{name}"
            entries.append(Entry(f"{key}.lora_A.weight", torch.bfloat16, (rank, k)))
            entries.append(Entry(f"{key}.lora_B.weight", torch.bfloat16, (n, rank)))
    torch.manual_seed(0)
    with ShardWriter(folder / "adapter_model.safetensors", entries) as writer:
        for entry in entries:
            writer.write(torch.randn(entry.shape, dtype=torch.float32).mul_(0.01).bfloat16())
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def timed(folder: Path, threads: int) -> dict[str, float]:
    """Wall and processor seconds of the whole command, imports and all; peak memory in bytes.

    `load` is the machine's at the end, its own two threads included; `nice` the priority.
    """
    command = [sys.executable, "-m", "hirank", "audit", "adapter", str(folder), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    load = os.getloadavg()[0]
    return {
        "seconds": round(seconds, 1),
        "processor_seconds": round(spent, 1),
        "peak_bytes": after.ru_maxrss * 1024,
        "adapter_bytes": (folder / "adapter_model.safetensors").stat().st_size,
        "load": round(load, 2),
        "nice": os.nice(0),
    }


if __name__ == "__main__":
    main()
