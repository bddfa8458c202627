"""Time the merge of an adapter into an 8B model's files, and record it.

    python benchmarks/merge.py --folder /tmp/merge [--rank 64] [--threads 2]

Writes a model of random numbers of Llama-3-8B's shape (16 GB, bf16, four shards) and a DoRA adapter
on all its seven linears into FOLDER, unless they are there, and merges them as `hirank merge
--no-verify` does, in a process of its own: another 16 GB. Beside it, on the same disk and threads,
stand the two costs that no merge is without: copying the files, and the products B A at the speed
of a large one. Adds a line to benchmarks/results/DEVICE/merge.jsonl. Delete FOLDER after.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from hirank.adapters.base_files import INDEX, Entry, ShardWriter
from hirank.bench.record import append, device_facts, source_facts, version_facts

HERE = Path(__file__).resolve().parent
LAYERS, HIDDEN, FFN, KV, VOCABULARY, SHARDS = 32, 4096, 14336, 1024, 128256, 4
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
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    base, adapter = given.folder / "base", given.folder / f"adapter-r{given.rank}"
    if not (base / "config.json").is_file():
        write_base(base, given.layers)
    if not (adapter / "adapter_config.json").is_file():
        write_adapter(adapter, given.rank, given.layers)
    metrics = timed(base, adapter, given.folder / "merged", given.threads)
    metrics["copy_seconds"] = copied(base, given.folder / "copy")
    metrics["product_seconds"] = products(given.rank, given.layers)
    record = {
        "suite": "merge",
        "arm": "hirank",
        "settings": {
            "model": "llama-3-8b", "layers": given.layers, "rank": given.rank, "method": "dora",
            "dtype": "bfloat16", "threads": given.threads,
        },
        "metrics": metrics,
        "device": device_facts(torch.device("cpu")),
        "versions": version_facts(),
        **source_facts(None),
        "command": f"python benchmarks/merge.py --rank {given.rank} --threads {given.threads}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    print(json.dumps(metrics), append(given.out, "merge", [record]))


def write_base(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    entries = [Entry("model.embed_tokens.weight", torch.bfloat16, (VOCABULARY, HIDDEN))]
    for number in range(layers):
        where = f"model.layers.{number}"
        entries += [Entry(f"{where}.{n}.weight", torch.bfloat16, s) for n, s in SHAPES.items()]
        for name in ("input_layernorm", "post_attention_layernorm"):
            entries.append(Entry(f"{where}.{name}.weight", torch.bfloat16, (HIDDEN,)))
    entries.append(Entry("model.norm.weight", torch.bfloat16, (HIDDEN,)))
    entries.append(Entry("lm_head.weight", torch.bfloat16, (VOCABULARY, HIDDEN)))
    size, where = -(-len(entries) // SHARDS), {}
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        held = entries[number * size : (number + 1) * size]
        write_random(folder / name, held, 0.02)
        where |= {entry.key: name for entry in held}
    index = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)


def write_adapter(folder: Path, rank: int, layers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number in range(layers):
        for name, (n, k) in SHAPES.items():
            key = f"base_model.model.model.layers.{number}.{name}"
            entries.append(Entry(f"{key}.lora_A.weight", torch.float32, (rank, k)))
            entries.append(Entry(f"{key}.lora_B.weight", torch.float32, (n, rank)))
            entries.append(Entry(f"{key}.lora_magnitude_vector", torch.float32, (n,)))
    write_random(folder / "adapter_model.safetensors", entries, 0.01)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def write_random(path: Path, entries: list[Entry], size: float) -> None:
    """Normal numbers around 0; magnitudes and norms around 1."""
    with ShardWriter(path, entries) as writer:
        for entry in entries:
            numbers = torch.randn(entry.shape).mul_(size)
            writer.write((numbers + (len(entry.shape) == 1)).to(entry.dtype))


def timed(base: Path, adapter: Path, out: Path, threads: int) -> dict[str, Any]:
    """Wall and processor seconds of the whole command, imports and all; peak memory in bytes.

    The peak is not below this process's own, which a child inherits: run it again once FOLDER has
    the model, or it is that of the making.
    """
    shutil.rmtree(out, ignore_errors=True)
    words = ["merge", str(adapter), "--base", str(base), "--out", str(out), "--no-verify"]
    command = [sys.executable, "-m", "hirank", *words, "--force", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    fidelity = json.loads(done.stdout)["fidelity"]
    written = sum(file.stat().st_size for file in out.iterdir())
    shutil.rmtree(out)
    return {
        "seconds": round(seconds, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_bytes": used.ru_maxrss * 1024,
        "written_bytes": written,
        "distortion": fidelity["total"]["distortion"],
        "load": round(os.getloadavg()[0], 2),
    }


def copied(base: Path, place: Path) -> float:
    """Seconds to copy the base's files and have them on the disk."""
    start = time.perf_counter()
    shutil.copytree(base, place)
    for file in place.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(place)
    return round(seconds, 1)


def products(rank: int, layers: int) -> float:
    """Seconds for all products B A at the speed of the largest one in fp32."""
    n, k = SHAPES["mlp.up_proj"]
    B, A, out = torch.randn(n, rank), torch.randn(rank, k), torch.empty(n, k)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(B, A, out=out)
        times.append(time.perf_counter() - start)
    total = layers * sum(n * k for n, k in SHAPES.values())
    return round(min(times) * total / (n * k), 1)


if __name__ == "__main__":
    main()
