"""Planned against measured peak memory: 90 settings of six models on one GPU, 16 on several.

    python benchmarks/plan_h200.py                 on a GPU; some minutes on an H200
    python benchmarks/plan_h200.py --only MODEL    one model (or method) of it; others: the rest
    python benchmarks/plan_h200.py --dry           tiny models on a CPU, by a count of live bytes
    torchrun --nproc-per-node 2 benchmarks/plan_h200.py --sharded [--dry]
                                                   DDP and FSDP2

All predictions are made and written down (plan_before.jsonl) before the first model is; then each
setting runs two steps with random weights, and the peak of the second is measured with
max_memory_allocated, beside it what the allocator took and what the process did. Adds a line a
setting to benchmarks/results/, and prints the table.

The dry run shows that it runs. Its errors say less: on a CPU some kernels make other tensors.

A setting that runs out of memory is a row as well: it was predicted to, or it is a miss.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hirank.bench.optim_memory import LivePeak
from hirank.bench.record import append, device_facts, source_facts, version_facts
from hirank.plan.closed import closed_form
from hirank.plan.find import find_config
from hirank.plan.inventory import read_shape
from hirank.plan.ledger import ESTIMATED, Overhead
from hirank.plan.setting import Setting
from hirank.plan.subject import build, optimizer_for

RESULTS = Path(__file__).resolve().parent / "results"
SMALL, MIDDLE, LARGE = "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-7b"
TINY = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}

# Settings.

METHODS: list[dict[str, Any]] = [
    {"method": "lora"},
    {"method": "dora"},
    {"method": "dora", "rank": 384},
    {"method": "dora-peft"},
    {"method": "qlora"},
    {"method": "qdora"},
    {"method": "full", "base_dtype": "fp32"},
    {"method": "full", "autocast": False},
    {"method": "galore", "rank": 128},
    {"method": "galore", "rank": 128, "step_in_backward": True},
    {"method": "qgalore", "rank": 128},
    {"method": "fira", "rank": 128},
    {"method": "apollo", "rank": 256},
]
PASSES: list[dict[str, Any]] = [
    {"sequence": 2048, "checkpointing": False},
    {"sequence": 8192, "checkpointing": True},
]
OTHERS: list[dict[str, Any]] = [
    {"method": "full", "autocast": False, "step": "foreach"},
    {"method": "full", "autocast": False, "step": "loop", "checkpointing": True},
    {"method": "lora", "attention": "eager", "sequence": 1024},
    {"method": "lora", "loss": "plain", "sequence": 4096, "checkpointing": True},
    {"method": "dora", "batch": 4, "accumulation": 2, "checkpointing": True},
    {"method": "lora", "autocast": False},
    {"method": "qlora", "kbit_upcast": True},
    {"method": "lora", "eval_batch": 16, "checkpointing": True},
]
OTHER_MODELS: list[dict[str, Any]] = [
    {"model": "moe", "method": "lora", "sequence": 2048},
    {"model": "moe", "method": "lora", "sequence": 4096, "checkpointing": True},
    {"model": "moe", "method": "dora", "targets": ("q_proj", "v_proj"), "sequence": 2048},
    {"model": "moe", "method": "full", "autocast": False, "sequence": 2048},
    {"model": "gemma-3-270m", "method": "lora", "sequence": 512, "batch": 4},
    {"model": "gemma-3-270m", "method": "full", "autocast": False, "sequence": 512, "batch": 4},
    {"model": "smollm2-135m", "method": "dora", "batch": 8},
    {"model": "smollm2-135m", "method": "full", "base_dtype": "fp32", "batch": 8},
    {"model": "smollm2-135m", "method": "lora", "packing": True, "batch": 2, "sequence": 2048},
]


def settings(dry: bool) -> list[Setting]:
    """Every method on every model with and without checkpointing, and some single choices."""
    models = ["tiny"] if dry else [SMALL, MIDDLE, LARGE]
    grid = [{"model": m, **method, **way} for m in models for method in METHODS for way in PASSES]
    grid += [{"model": models[0], **other} for other in OTHERS]
    grid += [] if dry else OTHER_MODELS
    made = [Setting(**{"rank": 16, **values}) for values in grid]
    if dry:
        small = [
            replace(s, sequence=s.sequence // 32, rank=min(s.rank, 16), loss="plain") for s in made
        ]
        return [s for s in small if not s.is_quantised]
    return [s for s in made if not s.is_quantised or _can_quantise(s)]


def _can_quantise(setting: Setting) -> bool:
    """The largest model would spend its time on the way through a folder."""
    return setting.model != LARGE and find_spec("bitsandbytes") is not None


def chosen(found: list[Setting], only: str | None) -> list[Setting]:
    """Those of a method or a model; `others` are those that are no part of the large grid."""
    if only == "others":
        return [s for s in found if s.model not in (SMALL, MIDDLE, LARGE)]
    return [s for s in found if only in (None, s.method, s.model)]


def config_of(setting: Setting) -> dict[str, Any]:
    known = {"tiny": {"model_type": "qwen2", **TINY}, "moe": MOE}
    return dict(known[setting.model]) if setting.model in known else find_config(setting.model)[0]


# Measuring.


def model_for(setting: Setting, device: str) -> Any:
    """The model with random weights: finite, as low-rank optimisers skip what is not."""
    values = config_of(setting)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    if setting.is_quantised:
        return quantised(setting, config)
    model: Any = build(setting, config).to_empty(device=device)
    inner = model.get_base_model() if setting.is_adapter else model
    inner.tie_weights()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(0, 0.02)
        for name, p in model.named_parameters():
            if "magnitude" in name:
                p.fill_(1.0)
    return model


def quantised(setting: Setting, config: Any) -> Any:
    """NF4 with double quantisation, by way of a folder, as everybody loads it."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    from hirank import accelerate

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("cuda"):
            whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        whole.save_pretrained(folder)
        del whole
        base = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=how, dtype=torch.bfloat16, device_map={"": 0}
        )
    if setting.kbit_upcast:
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    wanted = LoraConfig(
        r=setting.rank, target_modules="all-linear", use_dora=setting.has_gains,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return accelerate(get_peft_model(base, wanted)).train()


def loss_for(setting: Setting, model: Any, ids: Tensor) -> Tensor:
    """As the trainers compute it; what a model returns beside its loss is dropped."""
    given = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    if setting.packing:  # documents of 256 tokens
        given["position_ids"] = (torch.arange(ids.shape[1], device=ids.device) % 256).expand_as(ids)
    if setting.loss == "plain":
        found: Tensor = model(**given).loss
        return found
    return -model(**given, fused_lm_head=True).log_probs.sum() / ids.numel()


def prepare(setting: Setting, model: Any) -> Any:
    """What a trainer does to a model before the first step; returns the optimiser."""
    ready(setting, model)
    optimizer: Any = optimizer_for(setting, model)
    if setting.step_in_backward:
        optimizer.step_in_backward(micro_batches=setting.accumulation)
    return optimizer


def ready(setting: Setting, model: Any) -> None:
    """TRL's head, and checkpointing."""
    from trl.trainer.utils import add_fused_lm_head

    inner = model.get_base_model() if setting.is_adapter else model
    if setting.loss != "plain":
        add_fused_lm_head(inner, outputs=("log_probs", "entropy", "is_top1"))
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if setting.is_adapter:
            model.enable_input_require_grads()


def step(setting: Setting, model: Any, optimizer: Any, device: str) -> None:
    size = (setting.batch, setting.sequence)
    vocabulary = model.get_input_embeddings().num_embeddings
    for _ in range(setting.accumulation):
        ids = torch.randint(0, vocabulary, size, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=setting.autocast):
            loss = loss_for(setting, model, ids)
        loss.backward()
        del loss
    if not setting.step_in_backward:
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if setting.eval_batch:
        evaluate(setting, model, device)


def evaluate(setting: Setting, model: Any, device: str) -> None:
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (setting.eval_batch, setting.sequence), device=device)
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=setting.autocast):
        loss_for(setting, model, ids)
    model.train()


def measure(setting: Setting, device: str) -> dict[str, Any]:
    """Peaks of the second step in bytes by name; `measured` is None if there is a reason."""
    gc.collect()
    try:
        found = _on_gpu(setting) if device == "cuda" else {"measured": _on_cpu(setting)}
        return {**found, "reason": ""}
    except torch.OutOfMemoryError:
        return {"measured": None, "reason": "out of memory"}
    except (ImportError, RuntimeError, TypeError, ValueError) as error:  # the other rows go on
        return {"measured": None, "reason": f"{type(error).__name__}: {error}"[:200]}
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _on_gpu(setting: Setting) -> dict[str, int]:
    torch._C._cuda_clearCublasWorkspaces()  # those of the row before: each has its own
    before = torch.cuda.memory_allocated()
    model = model_for(setting, "cuda")
    optimizer = prepare(setting, model)
    return second_step(setting, model, optimizer, before)


def second_step(setting: Setting, model: Any, optimizer: Any, before: int = 0) -> dict[str, int]:
    """In tensors, by the allocator, and by the process with CUDA and its libraries."""
    step(setting, model, optimizer, "cuda")
    torch.cuda.reset_peak_memory_stats()
    step(setting, model, optimizer, "cuda")
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    return {
        "measured": torch.cuda.max_memory_allocated() - before,
        "reserved": reserved,
        "process": reserved + total - free - torch.cuda.memory_reserved(),
    }


def _on_cpu(setting: Setting) -> int:
    """Bytes that operations made and that are alive, and the model, which was there before."""
    model = model_for(setting, "cpu")
    known = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    with LivePeak() as live:
        optimizer = prepare(setting, model)
        step(setting, model, optimizer, "cpu")
        live.peak = live.now
        step(setting, model, optimizer, "cpu")
    return live.peak + (0 if setting.method == "qgalore" else sum(known.values()))


# The table.


def predict(setting: Setting, *, dry: bool = False) -> dict[str, Any]:
    on_top = Overhead(workspaces=0) if dry else ESTIMATED  # a CPU has none
    ledger = closed_form(setting, read_shape(config_of(setting), setting.model), on_top)
    return {
        "setting": asdict(setting),
        "planned": ledger.allocated,
        "planned_reserved": ledger.reserved,
        "planned_process": ledger.process,
        "moment": ledger.moment,
        "dominating": ledger.dominating,
    }


def facts(device: str, commit: str | None) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_facts(torch.device(device)),
        "versions": version_facts(),
        **source_facts(commit),
    }


def show(row: dict[str, Any]) -> None:
    s, measured = row["setting"], row["measured"]
    said = row["reason"] if measured is None else f"{measured / 2**30:8.3f}"
    off = "" if measured is None else f"{100 * (row['planned'] / measured - 1):+6.1f} %"
    what = f"{s['model']} {s['method']} r{s['rank']} {s['batch']}x{s['sequence']}"
    ways = [n for n in ("checkpointing", "step_in_backward", "autocast") if s[n]]
    ways += [n for n in ("packing", "kbit_upcast", "eval_batch") if s[n]]
    ways += [s["base_dtype"], s["loss"], s["step"], s["attention"], s["sharding"]]
    print(
        f"{what:<42} {row['planned'] / 2**30:8.3f} {said:>13} {off:>9}  {' '.join(ways)}",
        flush=True,
    )


def summary(rows: list[dict[str, Any]]) -> None:
    seen = [row for row in rows if row["measured"]]
    errors = [abs(row["planned"] / row["measured"] - 1) for row in seen]
    if errors:
        within, median = sum(error <= 0.05 for error in errors), statistics.median(errors)
        print(
            f"{within} of {len(errors)} within 5 %, median {100 * median:.2f} %, "
            f"worst {100 * max(errors):.1f} %; {len(rows) - len(seen)} without a number"
        )


def compare(found: list[Setting], suite: str, device: str, asked: argparse.Namespace) -> None:
    """Predict, write down, measure, compare."""
    known = facts(device, asked.commit)
    rows = [{**known, **predict(setting, dry=asked.dry)} for setting in found]
    append(asked.out, f"{suite}_before", rows)  # before the first is measured
    for setting, row in zip(found, rows, strict=True):
        began = time.perf_counter()
        row.update(measure(setting, device), seconds=round(time.perf_counter() - began, 1))
        append(asked.out, suite, [row])
        show(row)
    summary(rows)


def main() -> None:
    """One GPU, or this process's part in several."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--sharded", action="store_true", help="DDP and FSDP2, under torchrun")
    parser.add_argument("--only", help="settings whose method or model this is; or others")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    asked = parser.parse_args()
    if asked.sharded:
        from plan_sharded import compare_sharded

        return compare_sharded(asked)
    suite = "plan_dry" if asked.dry else "plan"
    found = chosen(settings(asked.dry), asked.only)
    return compare(found, suite, "cpu" if asked.dry else "cuda", asked)


if __name__ == "__main__":
    main()
