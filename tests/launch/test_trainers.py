"""`hirank run` around programs that train: the same losses, adapters that stock PEFT loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers import chat_rows, write_jsonl
from launch.running import ROOT, plain, run

TRAINER = str(ROOT / "examples" / "run" / "plain_trainer.py")
CONVERTED = "hirank: 14 DoRA layers converted ({}), 0 left to PEFT"
# fp32 throughout: two orders of summation, six steps of Adam
TOLERANCE = 1e-5


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    return write_jsonl(tmp_path / "rows" / "rows.jsonl", chat_rows(24))


def state(out: Path) -> Path:
    return next(out.rglob("checkpoint-6"))


def losses(out: Path) -> torch.Tensor:
    history = json.loads((state(out) / "trainer_state.json").read_text())["log_history"]
    return torch.tensor([entry["loss"] for entry in history if "loss" in entry])


def assert_same_training(without: Path, with_: Path, model: Path) -> None:
    assert len(losses(without)) == 6
    torch.testing.assert_close(losses(with_), losses(without), rtol=TOLERANCE, atol=0)
    left, right = (load_file(state(out) / "adapter_model.safetensors") for out in (without, with_))
    assert left.keys() == right.keys()
    torch.testing.assert_close(logits(model, with_), logits(model, without), rtol=0, atol=1e-5)


def logits(model: Path, out: Path) -> torch.Tensor:
    """In stock PEFT."""
    base = AutoModelForCausalLM.from_pretrained(model)
    tuned = PeftModel.from_pretrained(base, state(out)).eval()
    with torch.no_grad():
        return tuned(torch.arange(32)[None]).logits


def ok(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.train
def test_transformers_trainer(tmp_path: Path, rows: Path, tiny_model_dir: Path):
    words = [sys.executable, TRAINER, str(tiny_model_dir), str(rows)]
    without, with_, report = tmp_path / "without", tmp_path / "with", tmp_path / "report.json"
    ok(plain([*words, str(without), "--dora"]))
    done = ok(run("--report", report, "--", *words, with_, "--dora"))
    assert done.stderr.count("hirank") == done.stderr.count(CONVERTED.format("eager")) == 1
    told = json.loads(report.read_text())
    assert told["summary"] == [CONVERTED.format("eager")]
    assert [model["stage"] for model in told["models"]] == ["ran"]
    assert_same_training(without, with_, tiny_model_dir)


@pytest.mark.train
def test_two_processes(tmp_path: Path, rows: Path, tiny_model_dir: Path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words = [*torchrun, "--standalone", TRAINER, str(tiny_model_dir), str(rows)]
    without, with_, report = tmp_path / "without", tmp_path / "with", tmp_path / "report.json"
    ok(plain([*words, str(without), "--dora"]))
    done = ok(run("--report", report, "--", *words, with_, "--dora"))
    assert done.stderr.count(CONVERTED.format("eager")) == 1, "rank 0 alone speaks"
    told = json.loads(report.read_text())
    assert [(model["rank"], model["stage"]) for model in told["models"]] == [(0, "ran"), (1, "ran")]
    assert all(len(model["layers"]) == 14 for model in told["models"])
    assert told["summary"] == [CONVERTED.format("eager")]
    assert_same_training(without, with_, tiny_model_dir)


@pytest.mark.train
def test_trl_sft(tmp_path: Path, rows: Path, tiny_model_dir: Path):
    trl = Path(sys.executable).parent / "trl"
    if not trl.exists():
        pytest.skip("trl is not installed beside this Python")
    words = (
        f"{trl} sft --model_name_or_path {tiny_model_dir} --dataset_name {rows.parent} --use_peft "
        "--lora_r 4 --lora_target_modules all-linear --use_dora true --dtype float32 --bf16 false "
        "--use_cpu true --max_steps 6 --logging_steps 1 --save_steps 6 --learning_rate 1e-2 "
        "--per_device_train_batch_size 2 --report_to none --output_dir"
    ).split()
    without, with_ = tmp_path / "without", tmp_path / "with"
    ok(plain([*words, str(without)]))
    done = ok(run("--", *words, with_))
    assert CONVERTED.format("composed") in done.stderr
    assert_same_training(without, with_, tiny_model_dir)


MODELS = """
import copy, pickle, sys, warnings
warnings.simplefilter("ignore")
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from transformers import AutoModelForCausalLM
from torch import nn

def kinds(model):
    layers = [type(m) for m in model.modules() if hasattr(m, "lora_A")]
    return sorted({kind.__module__.split(".")[0] for kind in layers})

def hooks(model):
    return sum(len(m._forward_pre_hooks) for m in model.modules())

where, saved = sys.argv[1:]
ids = torch.arange(8)[None]
dora = LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"])
model = get_peft_model(AutoModelForCausalLM.from_pretrained(where), dora)
model.save_pretrained(saved)
copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
with model.disable_adapter():
    model(ids)
print("waiting", hooks(model) > 0)
model(ids)
print("made", kinds(model), hooks(model))
for made in copies:
    made(ids)
    print("copied", kinds(made), hooks(made) < 4)
model.add_adapter("later", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
model.set_adapter("later")
model(ids)
print("added", kinds(model), hooks(model))
loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(where), saved)
print("loaded", kinds(loaded))
torch.compile(loaded, backend="eager", fullgraph=True)(ids)
mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
mixed = inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "1"]), mixed)
mixed[1].base_layer.weight.requires_grad_(True)
mixed(torch.randn(3, 8))
"""


def test_models_made_loaded_copied_and_compiled(tmp_path: Path, tiny_model_dir: Path):
    script = tmp_path / "models.py"
    script.write_text(MODELS)
    done = ok(run("--verbose", "--", sys.executable, script, tiny_model_dir, tmp_path / "saved"))
    assert done.stdout.splitlines() == [
        "waiting True",
        "made ['hirank'] 0",
        "copied ['hirank'] True",
        "copied ['hirank'] True",
        "added ['hirank'] 0",
        "loaded ['hirank']",
    ]
    said = [line for line in done.stderr.splitlines() if line.startswith("hirank:")]
    assert said[0] == "hirank: 4 DoRA layers converted (eager), 0 left to PEFT"
    assert said[-1].startswith(
        "hirank: 1 LoRA layer converted (eager), 1 left to PEFT (1: the base weig"
    )
    assert "model.layers.0.self_attn.q_proj  dora  eager" in done.stderr


NEVER_RUN = """
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
model = nn.Sequential(nn.Linear(8, 8))
inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), model)
"""


def test_a_model_that_never_ran_is_told_at_the_end(tmp_path: Path):
    done = ok(run("--", sys.executable, "-c", NEVER_RUN))
    assert done.stderr.endswith("hirank: 1 LoRA layer converted (eager), 0 left to PEFT\n")


def test_peft_without_adapters():
    done = ok(run("--", sys.executable, "-c", "import peft"))
    assert done.stderr.endswith("hirank: no LoRA or DoRA layer was created in this run\n")


def test_the_guide_shows_what_ran():
    script = ROOT / "examples" / "run" / "prove.py"
    ok(plain([sys.executable, str(script), "--table", "--check"]))
