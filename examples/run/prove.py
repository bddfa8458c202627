"""Run real trainers with and without `hirank run`, compare, and write down what came out.

    python examples/run/prove.py NAME=BIN [NAME=BIN ...]
    python examples/run/prove.py --table [--check]

NAME is transformers, trl, llamafactory or swift; BIN the bin folder of the virtual environment it
is installed in, which needs no hirank. Each trains a tiny random model on the CPU in fp32 for six
steps, LoRA and DoRA, once as it is and once under `hirank run`. Then the losses must agree, and so
must the logits of the saved adapter in stock PEFT and with hirank. A line for each goes to
benchmarks/results/DEVICE/trainers.jsonl; --table makes the table in docs/run.md from the newest.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GUIDE = ROOT / "docs" / "run.md"
BEGIN, END = "<!-- trainers -->", "<!-- end of trainers -->"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

# hirank from here, without PYTHONPATH: the trainer's environment must do without it
LAUNCHER = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import hirank.cli as c; c.main()"
)

# fp32: another order of summation, six steps of Adam. What was seen is in the results.
LOSS_TOLERANCE = LOGIT_TOLERANCE = 1e-5
PACKAGES = {"transformers": "transformers", "trl": "trl", "llamafactory": "llamafactory",
            "swift": "ms-swift"}  # fmt: skip
COMMON = (
    "--max_steps 6 --logging_steps 1 --save_steps 6 --learning_rate 1e-2 "
    "--per_device_train_batch_size 2 --report_to none "
)
COMMANDS = {
    "transformers": "python {here}/plain_trainer.py {work}/model {work}/rows/rows.jsonl {out}",
    "trl": "trl sft --model_name_or_path {work}/model --dataset_name {work}/rows "
    "--output_dir {out} --use_peft --lora_r 4 --lora_target_modules all-linear "
    "--dtype float32 --bf16 false --use_cpu true " + COMMON,
    "llamafactory": "llamafactory-cli train --stage sft --do_train true "
    "--model_name_or_path {work}/model --finetuning_type lora --lora_rank 4 --lora_target all "
    "--template chatml --dataset tiny --dataset_dir {work} --cutoff_len 128 --output_dir {out} "
    + COMMON,
    "swift": "swift sft --model {work}/model --model_type llama --template chatml "
    "--dataset {work}/rows/rows.jsonl --output_dir {out} --tuner_type lora --lora_rank 4 "
    "--target_modules all-linear --torch_dtype float32 --max_length 128 "
    "--gradient_accumulation_steps 1 " + COMMON,
}
DORA = {"transformers": "--dora", "trl": "--use_dora true", "llamafactory": "--use_dora true",
        "swift": "--use_dora true"}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainers", nargs="*", metavar="NAME=BIN")
    parser.add_argument("--table", action="store_true", help="bring the table in docs/run.md up")
    parser.add_argument("--check", action="store_true", help="with --table: fail if it is not")
    given = parser.parse_args()
    if given.table:
        return update_table(write=not given.check)
    pairs = [trainer.partition("=") for trainer in given.trainers]
    if not pairs or any(name not in COMMANDS or not place for name, _, place in pairs):
        parser.error(f"name trainers as NAME=BIN, with NAME one of {', '.join(COMMANDS)}")
    with tempfile.TemporaryDirectory() as work:
        make_inputs(Path(work))
        lines = [
            prove(name, Path(place).absolute(), method, Path(work))
            for name, _, place in pairs
            for method in ("lora", "dora")
        ]
    from hirank.bench.record import append

    print(append(RESULTS, "trainers", lines))
    return 0 if all(line["passed"] for line in lines) else 1


def make_inputs(work: Path) -> None:
    """A tiny random Llama with a tokenizer; forty conversations, in two forms."""
    from helpers import chat_rows, save_tiny_model, write_jsonl

    (work / "rows").mkdir()
    save_tiny_model(work / "model")
    rows = chat_rows(40)
    write_jsonl(work / "rows" / "rows.jsonl", rows)
    turns = [[turn["content"] for turn in row["messages"]] for row in rows]
    alpaca = [{"instruction": asked, "input": "", "output": told} for asked, told in turns]
    (work / "alpaca.json").write_text(json.dumps(alpaca), encoding="utf-8")
    (work / "dataset_info.json").write_text('{"tiny": {"file_name": "alpaca.json"}}')


def prove(name: str, place: Path, method: str, work: Path) -> dict[str, Any]:
    """Train twice, compare, and return the record."""
    template = COMMANDS[name] + (" " + DORA[name] if method == "dora" else "")
    outs = {arm: work / f"{name}-{method}-{arm}" for arm in ("without", "with")}
    report = work / "report.json"
    hirank = [sys.executable, "-c", LAUNCHER, "run", "--report", str(report), "--"]
    for arm, out in outs.items():
        program, *words = shlex.split(
            template.format(work=work, out=out, here=Path(__file__).parent)
        )
        command = [str(place / program), *words]
        execute(hirank + command if arm == "with" else command)
    states = {arm: checkpoint(out) for arm, out in outs.items()}
    losses = {arm: losses_of(state) for arm, state in states.items()}
    told = json.loads(report.read_text(encoding="utf-8"))
    line = {
        "suite": "trainers",
        "trainer": name,
        "method": method,
        "losses": losses,
        "loss_difference": worst(losses["without"], losses["with"]),
        **logits(work / "model", states["with"]),
        "hirank": told["summary"],
        "versions": told["models"][0]["versions"] | versions(place / "python", name),
        "command": template.format(work="WORK", out="OUT", here="examples/run"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    line |= facts()
    line["passed"] = passed(line)
    print(name, method, "passed:" if line["passed"] else "FAILED:", line["hirank"][0], end="; ")
    print(f"losses {line['loss_difference']:.1e}, logits {line['logit_difference']:.1e}")
    return line


def execute(command: list[str]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def checkpoint(out: Path) -> Path:
    return next(out.rglob("checkpoint-6"))


def losses_of(state: Path) -> list[float]:
    history = json.loads((state / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def worst(left: list[float], right: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(left, right, strict=True))


def logits(model: Path, adapter: Path) -> dict[str, float]:
    """The saved adapter in stock PEFT, against hirank and against the base: relative RMS."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hirank import accelerate

    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    ids = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        stock = tuned(ids).logits.double()
        with tuned.disable_adapter():
            base = tuned(ids).logits.double()
        ours = accelerate(tuned)(ids).logits.double()
    return {
        "logit_difference": ((stock - ours).norm() / stock.norm()).item(),
        "learnt": ((stock - base).norm() / base.norm()).item(),
    }


def versions(python: Path, name: str) -> dict[str, str]:
    """Of Python and the trainer's packages, asked in its own environment."""
    code = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version()} "
        "| {name: version(name) for name in sys.argv[1:]}))"
    )
    command = [str(python), "-c", code, PACKAGES[name], "transformers"]
    found: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return found


def facts() -> dict[str, Any]:
    import torch

    from hirank.bench.record import device_facts, source_facts

    return {"device": device_facts(torch.device("cpu"))} | source_facts(None)


def passed(line: dict[str, Any]) -> bool:
    losses = line["losses"]["with"]
    return (
        len(losses) >= 5
        and all(map(math.isfinite, losses))
        and line["loss_difference"] <= LOSS_TOLERANCE
        and line["logit_difference"] <= LOGIT_TOLERANCE
        and line["learnt"] > 1e-2
        and all("0 left to PEFT" in said for said in line["hirank"])
    )


def update_table(*, write: bool) -> int:
    text = GUIDE.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    new = f"{text[:start]}\n{table()}\n{text[stop:]}"
    if write:
        GUIDE.write_text(new, encoding="utf-8")
    elif new != text:
        print("docs/run.md differs from the results: python examples/run/prove.py --table")
    return int(new != text and not write)


def table() -> str:
    """The newest record of each trainer and method that passed."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(RESULTS.glob("*/trainers.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["passed"]:
                newest[line["trainer"], line["method"]] = line
    rows = [
        "| Program | With | Method | Last loss without, with | Largest difference of a loss | "
        "Logits, stock PEFT | Date |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *(row(line) for line in newest.values())])


def row(line: dict[str, Any]) -> str:
    of = line["versions"]
    package = PACKAGES[line["trainer"]]
    others = [name for name in ("peft", "transformers", "torch") if name != package]
    cells = [
        f"{package} {of[package]}",
        ", ".join(f"{name} {of[name]}" for name in others),
        {"lora": "LoRA", "dora": "DoRA"}[line["method"]],
        ", ".join(f"{line['losses'][arm][-1]:.6f}" for arm in ("without", "with")),
        f"{line['loss_difference']:.1e}",
        f"{line['logit_difference']:.1e}",
        line["date"][:10],
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
