"""What a merge keeps, against brute force; and `hirank merge` as a user meets it."""

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from helpers import chat_rows, save_tiny_model, write_jsonl
from hirank.adapters.few_bits import as_trained
from hirank.adapters.files import AdapterFolder, AdapterLayer
from hirank.adapters.merge_files import merge_matrix
from hirank.audit.merge import FidelityMeter
from hirank.audit.merge_run import as_json
from hirank.audit.served import Prompt, probe, served
from hirank.cli import app


def layer(scale: float, *, dora: bool = False, size: int = 96) -> AdapterLayer:
    torch.manual_seed(0)
    return AdapterLayer(
        name="a",
        kind="linear",
        lora_A=torch.randn(4, size),
        lora_B=torch.randn(size, 4),
        magnitude=torch.rand(size) + 5 if dora else None,
        bias=None,
        alpha=4,
        scale=scale,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dora", [True, False])
@pytest.mark.parametrize("scale", [1e-1, 1e-3, 1e-5])
def test_every_figure_is_that_of_brute_force(dtype: torch.dtype, dora: bool, scale: float):
    adapter, weight = layer(scale, dora=dora), torch.randn(96, 96).to(dtype)
    meter = FidelityMeter()
    stored = merge_matrix(weight, adapter, dtype, watch=meter).double()
    before = weight.double()
    after = before + scale * adapter.lora_B.double() @ adapter.lora_A.double()
    if adapter.magnitude is not None:
        after *= (adapter.magnitude.double() / after.norm(dim=1))[:, None]
    wanted, error = after - before, stored - after
    found = meter.result().layers[0]
    assert found.distortion == pytest.approx(float(error.norm() / wanted.norm()), rel=1e-3)
    rms = float(wanted.square().mean().sqrt())
    assert found.largest == pytest.approx(float(error.abs().max()) / rms, rel=1e-3)
    assert found.change == pytest.approx(float(wanted.norm() / before.norm()), rel=1e-3)
    swallowed = float((stored == before).double().mean())
    assert found.swallowed == pytest.approx(swallowed, abs=1e-3)


def test_a_weight_above_fp16_that_its_gain_brings_back():
    """A row of DoRA may be larger in the base than in the merged model."""
    adapter, weight = layer(1e-1, dora=True), torch.randn(96, 96)
    weight[0, 0] = 1e5
    meter = FidelityMeter()
    merge_matrix(weight, adapter, torch.float16, watch=meter)
    assert meter.result().total.distortion < 0.01


def test_the_verdict_follows_the_noise():
    verdicts = {}
    for scale in (1.0, 3e-3, 1e-5):
        meter = FidelityMeter()
        merge_matrix(torch.randn(96, 96).bfloat16(), layer(scale), torch.bfloat16, watch=meter)
        verdicts[scale] = meter.result().verdict
    assert verdicts == {1.0: "safe", 3e-3: "lossy", 1e-5: "destroyed"}


def test_a_wider_dtype_keeps_what_bf16_loses():
    weight, adapter = torch.randn(96, 96).bfloat16(), layer(1e-5)
    meter = FidelityMeter()
    merge_matrix(weight, adapter, torch.float32, watch=meter)
    assert meter.result().verdict == "safe"
    assert meter.result().total.swallowed < 0.01


def test_layers_add_up():
    meter = FidelityMeter()
    for name, scale in (("a", 1.0), ("b", 1e-3)):
        part = AdapterLayer(**vars(layer(scale)) | {"name": name})
        merge_matrix(torch.randn(96, 96).bfloat16(), part, torch.bfloat16, watch=meter)
    whole = meter.result()
    assert [each.name for each in whole.layers] == ["a", "b"]
    assert whole.worst.name == "b"
    assert whole.layers[0].distortion < whole.total.distortion < whole.layers[1].distortion


# A model, an adapter, and the command.


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, and an adapter that learnt a few rows of prompts by heart."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("merge")
    save_tiny_model(folder / "base")
    write_jsonl(folder / "prompts.jsonl", chat_rows(4))
    model = AutoModelForCausalLM.from_pretrained(folder / "base").bfloat16()
    model.save_pretrained(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    config = LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules="all-linear")
    torch.manual_seed(0)
    wrapped = get_peft_model(model.float(), config)
    rows = [
        tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in chat_rows(4)
    ]
    optimizer = torch.optim.AdamW((p for p in wrapped.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(12):
        loss = sum(wrapped(torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
    wrapped.save_pretrained(folder / "adapter")
    return folder


def test_a_merge_is_written_judged_and_verified(trained: Path, tmp_path: Path):
    out = tmp_path / "merged"
    done = call("merge", trained / "adapter", "--out", out, "--check", trained / "prompts.jsonl")
    assert done.exit_code == 0, done.output
    assert "Verified: it loads whole, and its logits are off by" in done.output
    assert "Good: the merge shifts" in done.output
    report = json.loads((out / "merge.json").read_text())
    assert report["check"]["good"] and report["check"]["gain"] > 0.1
    assert report["verified"]["distance"] < 0.2
    assert report["fidelity"]["verdict"] in ("safe", "lossy")


def test_a_dry_run_writes_nothing_and_says_the_same(trained: Path, tmp_path: Path):
    done = call("merge", trained / "adapter", "--dry-run", "--json")
    report = json.loads(done.output)
    assert (done.exit_code, report["out"]) == (0, None)
    call("merge", trained / "adapter", "--out", tmp_path / "m")
    assert json.loads((tmp_path / "m" / "merge.json").read_text())["fidelity"] == report["fidelity"]


@pytest.fixture
def weak(trained: Path, tmp_path: Path) -> Path:
    """The adapter as it would be after next to no training."""
    folder = tmp_path / "weak"
    folder.mkdir()
    tensors = load_file(trained / "adapter" / "adapter_model.safetensors")
    base = load_file(trained / "base" / "model.safetensors")
    for key in tensors:
        if "lora_B" in key:
            tensors[key] *= 1e-5
        if "magnitude" in key:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")
            tensors[key] = base[f"{name}.weight"].float().norm(dim=1) * (1 + 1e-6)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        (trained / "adapter" / "adapter_config.json").read_text()
    )
    return folder


def test_a_merge_that_destroys_is_not_kept(weak: Path, tmp_path: Path):
    done = call("merge", weak, "--out", tmp_path / "m")
    assert done.exit_code == 1
    assert done.output.startswith("DESTROYED: Rounding to bfloat16 ruins")
    assert "Nothing was written." in done.output
    assert not (tmp_path / "m").exists()
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    forced = call("merge", weak, "--out", tmp_path / "m", "--force")
    assert forced.exit_code == 1 and (tmp_path / "m" / "config.json").exists()
    wide = call("merge", weak, "--out", tmp_path / "w", "--dtype", "float32")
    assert wide.exit_code == 0 and wide.output.startswith("SAFE")


def test_prompts_count_by_their_scored_tokens(trained: Path):
    """One without answers says nothing, and does not make the shift look smaller."""
    told = Prompt(list(range(5, 20)), [True] * 15)
    silent = Prompt(list(range(40, 60)), [False] * 20)
    folders = [trained / name for name in ("base", "adapter", "base")]
    one, many = (served(*folders, prompts) for prompts in ([told], [told] + 9 * [silent]))
    assert (many.gain, many.shift) == (one.gain, one.shift)
    assert not many.good


def test_logits_that_are_no_numbers_are_no_proof(trained: Path, tmp_path: Path):
    shutil.copytree(trained / "base", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    done = call(
        "merge", trained / "adapter", "--base", tmp_path / "base", "--out", tmp_path / "out"
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert "computes logits that are no numbers" in done.stderr
    assert not (tmp_path / "out").exists()


def test_json_has_null_where_there_is_no_number():
    """Rounding by chance moves weights to which an untrained adapter adds nothing."""
    meter = FidelityMeter()
    merge_matrix(torch.randn(96, 96), layer(0), torch.bfloat16, seed=0, watch=meter)
    report = json.loads(as_json(meter.result().as_dict()), parse_constant=pytest.fail)
    assert (report["total"]["distortion"], report["total"]["change"]) == (None, 0)


def test_prompts_that_lose_their_gain_are_told(trained: Path, tmp_path: Path):
    """A folder that is the base again has lost all of it."""
    prompts = [Prompt(list(range(5, 20)), [True] * 15)]
    found = served(trained / "base", trained / "adapter", trained / "base", prompts)
    assert found.merged == pytest.approx(found.base)
    assert found.distance == pytest.approx(1, rel=1e-5)
    assert found.shift == pytest.approx(abs(found.gain))
    assert not found.good
    wanted = "gains nothing" if found.gain <= 0 else "Not good: the merge shifts 1e+02 %"
    assert wanted in found.told


def test_log_probabilities_are_those_of_the_formula(trained: Path):
    from transformers import AutoModelForCausalLM

    prompts = [Prompt([3, 9, 4, 7, 11], [True, False, False, True, True])]
    found = served(trained / "base", trained / "adapter", trained / "base", prompts)
    model = AutoModelForCausalLM.from_pretrained(trained / "base").float().eval()
    with torch.no_grad():
        chances = model(torch.tensor([[3, 9, 4, 7, 11]])).logits.double().softmax(-1)[0]
    right = (math.log(chances[2, 7]) + math.log(chances[3, 11])) / 2
    assert found.base == pytest.approx(right, rel=1e-4)
    assert found.tokens == 2


def test_the_probe_is_the_same_every_time():
    assert probe(50) == probe(50)
    assert all(0 <= token < 50 for prompt in probe(50) for token in prompt.input_ids)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Give either --out FOLDER, or --dry-run"),
        (["--out", "x", "--dry-run"], "Give either --out FOLDER, or --dry-run"),
        (["--dry-run", "--check", "x"], "--check reads the merged folder"),
        (["--dry-run", "--dtype", "int4"], "--dtype got 'int4': choose from bfloat16"),
        (["--dry-run", "--base", "nobody/nothing"], "nobody/nothing is not on this machine"),
        (["--dry-run", "--base", "/no/such"], "There is no model folder /no/such"),
        (["--dry-run", "--trained-on", "nf3"], "'nf3': choose from nf4"),
        (["--dry-run", "--stochastic", 1, "--dtype", "float16"], "is written as float16"),
    ],
)
def test_bad_input_is_one_sentence(trained: Path, words: list[object], said: str):
    done = call("merge", trained / "adapter", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
def test_a_quantised_training_is_merged_into_what_it_saw(trained: Path, tmp_path: Path, kind: str):
    """D33: the merged folder computes what the layers on the quantised base do."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from hirank.adapters.export import load_adapter

    settings = (
        {"load_in_8bit": True}
        if kind == "int8"
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": kind.endswith("double"),
            "bnb_4bit_compute_dtype": torch.float32,
        }
    )
    quantised = AutoModelForCausalLM.from_pretrained(
        trained / "base", quantization_config=BitsAndBytesConfig(**settings), dtype=torch.bfloat16
    )
    out = tmp_path / "merged"
    wide = ("--dtype", "float32")
    done = call("merge", trained / "adapter", "--out", out, "--trained-on", kind, *wide)
    assert done.exit_code == 0, done.output
    dense = quantised.dequantize(dtype=torch.bfloat16).float()
    tokens = torch.tensor([probe(50)[0].input_ids])
    with torch.no_grad():
        wanted = load_adapter(dense, trained / "adapter").eval()(tokens).logits
        found = AutoModelForCausalLM.from_pretrained(out).float().eval()(tokens).logits
        other = tmp_path / "other"
        call("merge", trained / "adapter", "--out", other, *wide)
        plain = AutoModelForCausalLM.from_pretrained(other).float().eval()(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (plain - wanted).norm() > 10 * (found - wanted).norm()


def test_the_gap_to_weights_that_were_not_trained_on_is_told(trained: Path, tmp_path: Path):
    """D33: the user may merge into the base's own weights, and hears what that changes."""
    pytest.importorskip("bitsandbytes")
    words = ("merge", trained / "adapter", "--dry-run", "--trained-on", "nf4", "--into-original")
    gap = json.loads(call(*words, "--json").output)["gap"]
    base = load_file(trained / "base" / "model.safetensors")
    adapter = AdapterFolder(trained / "adapter")
    apart, step, gaps = 0.0, 0.0, []
    for part in adapter:
        weight = base[f"{part.name}.weight"]
        beside = as_trained(weight, "nf4").double()
        delta = part.scale * part.B.double() @ part.A.double()
        norms = [(w.double() + delta).norm(dim=1) for w in (weight, beside)]
        gaps.append((norms[0] - norms[1]).abs() / norms[1])
        assert part.magnitude is not None
        gain = part.magnitude.double() / norms[1]
        step += float((gain[:, None] * (beside + delta) - beside).square().sum())
        apart += float((weight.double() - beside).square().sum())
    assert gap["distance"] == pytest.approx((apart / step) ** 0.5, rel=1e-3)
    assert gap["norms"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-3)
    assert ("merge without --into-original" in gap["told"]) == (gap["norms"] > 0.01)
    done = call(*words[:3], "--into-original")
    assert "--into-original goes with --trained-on" in done.stderr


def test_a_folder_for_gguf(trained: Path, tmp_path: Path):
    words = ("export", "gguf", trained / "adapter", "--out", tmp_path / "gguf")
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert "Verified: it loads whole" in done.output
    assert f"convert_hf_to_gguf.py {tmp_path / 'gguf'} --outfile" in done.output
    assert (tmp_path / "gguf" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda base: (base / "tokenizer.json").unlink(), "which a GGUF file needs"),
        (
            lambda base: (base / "config.json").write_text(
                (base / "config.json").read_text().replace('"llama"', '"whisper"')
            ),
            "a model of type 'whisper', which is not among",
        ),
    ],
)
def test_a_folder_that_gives_no_gguf_is_refused(
    trained: Path, tmp_path: Path, change: Any, said: str
):
    shutil.copytree(trained / "base", tmp_path / "base")
    change(tmp_path / "base")
    words = ("export", "gguf", trained / "adapter", "--out", tmp_path / "gguf")
    done = call(*words, "--base", tmp_path / "base")
    assert done.exit_code == 2 and said in done.stderr
    assert not (tmp_path / "gguf").exists()


def test_the_page_shows_the_recorded_merge():
    """docs/merge.md is what the newest line of merge_demo.jsonl gives."""
    file = Path(__file__).parents[2] / "benchmarks" / "merge_demo.py"
    spec = importlib.util.spec_from_file_location("merge_demo", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0


def test_an_adapter_that_was_not_trained_is_told():
    adapter = AdapterLayer(**vars(layer(1.0)) | {"lora_B": torch.zeros(96, 4)})
    meter = FidelityMeter()
    merge_matrix(torch.randn(96, 96).bfloat16(), adapter, torch.bfloat16, watch=meter)
    assert "changes no weight" in meter.result().advice
