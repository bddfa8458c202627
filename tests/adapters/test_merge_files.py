"""A folder merged on disk computes what the adapter does: against an fp64 merger of a few lines."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    ViTConfig,
    ViTForImageClassification,
)
from transformers import LlamaForCausalLM as Llama

from hirank.adapters.base_files import BaseFolder
from hirank.adapters.export import load_adapter
from hirank.adapters.files import AdapterFolder
from hirank.adapters.merge_files import merge_matrix, write_merged
from hirank.adapters.merge_plan import Rounding, plan_merge
from hirank.errors import HirankError

pytestmark = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out is set to",
    "ignore:Model has `tie_word_embeddings=True`",
    "ignore:Setting `save_embedding_layers`",
)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    return Llama(LlamaConfig(**sizes | changes))


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    return GPT2LMHeadModel(config)


def vit() -> Any:
    """A convolution among the layers."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        image_size=8, patch_size=4, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config)


def save_pair(folder: Path, model: Any, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    """`folder/base` and `folder/adapter`; the base in a few shards."""
    model = model.to(dtype)
    model.save_pretrained(folder / "base", max_shard_size=lora.pop("shard", "5GB"))
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "use_dora": True} | lora)
    wrapped = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.2 * torch.randn_like(parameter) * parameter.abs().mean().add(0.1))
    wrapped.save_pretrained(folder / "adapter")
    return wrapped


def merge(folder: Path, target: str = "merged", **rounding: Any) -> Path:
    base, adapter = BaseFolder(folder / "base"), AdapterFolder(folder / "adapter")
    write_merged(plan_merge(base, adapter, Rounding(**rounding)), folder / target)
    return folder / target


def logits(model: Any) -> Tensor:
    tokens = torch.arange(24).reshape(2, 12) % 50
    with torch.no_grad():
        return model.eval()(tokens).logits


def unmerged(folder: Path, **options: Any) -> Tensor:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", **options)
    return logits(load_adapter(base, folder / "adapter"))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (llama, {"target_modules": LINEARS, "use_dora": False}),
    "rslora": (llama, {"target_modules": LINEARS, "use_dora": False, "use_rslora": True}),
    "dora": (llama, {"target_modules": LINEARS}),
    "patterns": (llama, {"target_modules": LINEARS, "rank_pattern": {"q_proj": 2}}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "head": (llama, {"target_modules": ["lm_head", "q_proj"]}),
    "whole head": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "sharded": (llama, {"target_modules": LINEARS, "shard": "20KB"}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2 embedding": (gpt2, {"target_modules": ["c_attn", "wte"]}),
    "gpt2 head": (gpt2, {"target_modules": ["c_attn", "lm_head"]}),
    "tied embedding": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["embed_tokens"]},
    ),
    "tied head": (lambda: llama(tie_word_embeddings=True), {"target_modules": ["lm_head"]}),
    "tied, neither": (lambda: llama(tie_word_embeddings=True), {"target_modules": ["q_proj"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_plain_transformers_computes_what_the_adapter_did(tmp_path: Path, case: str):
    build, lora = CASES[case]
    save_pair(tmp_path, build(), **lora)
    target = merge(tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits(model), unmerged(tmp_path), rtol=1e-4, atol=1e-5)
    names = [name for file in target.glob("*.safetensors") for name in load_file(file)]
    assert not any("lora_" in name for name in names)
    assert {f.name for f in target.glob("*.safetensors")} == {
        f.name for f in (tmp_path / "base").glob("*.safetensors")
    }


@pytest.mark.parametrize("dora", [True, False])
def test_a_model_that_is_no_language_model(tmp_path: Path, dora: bool):
    targets = ["projection", "query", "dense"]
    wrapped = save_pair(tmp_path, vit(), target_modules=targets, use_dora=dora)
    model = ViTForImageClassification.from_pretrained(merge(tmp_path))
    image = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        wanted, found = (each.eval()(pixel_values=image).logits for each in (wrapped, model))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert "conv" in {layer.kind for layer in AdapterFolder(tmp_path / "adapter")}


def reference(weight: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """m (W + s B A) / |W + s B A| in fp64, and the size of what was added up for it."""
    B, A = layer.scale * layer.B.double(), layer.A.double()
    adapted, terms = weight.double() + B @ A, weight.double().abs() + B.abs() @ A.abs()
    if layer.magnitude is None:
        return adapted, terms
    gain = layer.magnitude.double()[:, None] / adapted.norm(dim=1, keepdim=True)
    return gain * adapted, gain.abs() * terms


KINDS: dict[str, tuple[Any, list[str]]] = {
    "linears": (llama, LINEARS),
    "embedding": (llama, ["embed_tokens"]),
    "Conv1D": (gpt2, ["c_attn", "c_proj", "c_fc", "wte"]),
    "convolution": (vit, ["projection", "query", "dense"]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["dora", "lora", "rslora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_rounded_once(tmp_path: Path, kind: str, method: str, dtype: torch.dtype):
    build, targets = KINDS[kind]
    options = {"use_dora": method == "dora", "use_rslora": method == "rslora"}
    save_pair(tmp_path, build(), dtype, target_modules=targets, **options)
    merged, base = BaseFolder(merge(tmp_path)), BaseFolder(tmp_path / "base")
    for layer in AdapterFolder(tmp_path / "adapter"):
        before, after = (f.weight(f"{layer.name}.weight") for f in (base, merged))
        assert after.dtype == dtype
        if layer.kind == "embedding" or (kind == "Conv1D" and "c_" in layer.name):
            before, after = before.T, after.T
        right, terms = reference(before.flatten(1), layer)
        one_rounding = torch.finfo(dtype).eps / 2 * right.abs().clamp(min=torch.finfo(dtype).tiny)
        accumulated = 4 * torch.finfo(torch.float32).eps * terms
        assert ((after.flatten(1).double() - right).abs() <= one_rounding + accumulated).all()


def test_untouched_weights_and_other_files_are_copied_to_the_bit(tmp_path: Path):
    save_pair(tmp_path, llama(), torch.bfloat16, target_modules=["q_proj"], shard="20KB")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "pytorch_model.bin").write_bytes(b"old")
    target = merge(tmp_path)
    assert (target / "tokenizer.json").read_text() == "{}"
    assert not (target / "pytorch_model.bin").exists()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads(
        (tmp_path / "base" / "model.safetensors.index.json").read_text()
    )["weight_map"]  # fmt: skip
    for file in (tmp_path / "base").glob("*.safetensors"):
        before, after = load_file(file), load_file(target / file.name)
        for key, tensor in before.items():
            assert torch.equal(after[key], tensor) == ("q_proj" not in key), key


def test_all_floats_take_the_dtype_that_is_asked_for(tmp_path: Path):
    save_pair(tmp_path, llama(), torch.bfloat16, target_modules=LINEARS)
    target = merge(tmp_path, dtype=torch.float32)
    assert {t.dtype for t in load_file(target / "model.safetensors").values()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.float32
    wanted = unmerged(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)


def test_stochastic_rounding_is_seeded_and_right_on_average(tmp_path: Path):
    save_pair(tmp_path, llama(), torch.bfloat16, target_modules=["q_proj"])
    layer = AdapterFolder(tmp_path / "adapter").layer("model.layers.0.self_attn.q_proj")
    weight = BaseFolder(tmp_path / "base").weight(f"{layer.name}.weight")
    runs = [merge_matrix(weight, layer, torch.bfloat16, seed).double() for seed in range(200)]
    file = load_file(merge(tmp_path, seed=3) / "model.safetensors")
    assert torch.equal(file[f"{layer.name}.weight"].double(), runs[3])
    right, _ = reference(weight, layer)
    unit = 2**-7 * right.abs()  # at most the gap between two bf16 numbers
    stack = torch.stack(runs)
    assert ((stack - right).abs() <= 1.001 * unit).all()
    assert ((stack.mean(0) - right).abs() / unit).max() < 4.5 * 0.5 / 200**0.5


# What is refused, and before anything is written.


def refused(folder: Path, said: str, **rounding: Any) -> None:
    with pytest.raises(HirankError, match=said) as caught:
        merge(folder, **rounding)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in folder.iterdir() if "merg" in p.name) == []


def test_a_base_of_another_shape_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    llama(hidden_size=64).save_pretrained(tmp_path / "base")
    refused(
        tmp_path, r"down_proj has a weight \[64, 48\] in the base and an adapter for \[32, 48\]"
    )


@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.self_attn.q_proj"])
def test_numbers_above_fp16_are_refused(tmp_path: Path, name: str):
    """Merged or only copied: they would be stored as infinities."""
    model = llama()
    torch.nn.init.constant_(model.get_submodule(name).weight, 7e4)
    save_pair(tmp_path, model, target_modules=["q_proj"], use_dora=False)
    refused(
        tmp_path,
        f"{name}.* holds numbers above 6.55e\\+04, which float16 has not",
        dtype=torch.float16,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": "Llama"}, "names no architectures"),
        ({"architectures": [None]}, "names None, which this Transformers lacks"),
        ({"hidden_size": "32"}, "describes no model"),
        ({"num_attention_heads": 0}, "describes no model"),
        ({"hidden_size": -3}, "describes no model"),
    ],
)
def test_configs_that_describe_no_model(tmp_path: Path, changes: dict[str, Any], said: str):
    save_pair(tmp_path, llama(), target_modules=["q_proj"])
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(tmp_path, said)


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=["q_proj"])
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", tmp_path / "base")
    refused(tmp_path, "holds an adapter_config.json beside the model")


def test_a_link_to_an_empty_folder_is_followed_and_the_current_folder_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_pair(tmp_path, llama(), target_modules=["q_proj"])
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    merge(tmp_path, "link")
    assert (tmp_path / "real" / "model.safetensors").exists() and (tmp_path / "link").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(HirankError, match="is the current folder"):
        merge(tmp_path, "here")


def test_a_base_with_other_names_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    gpt2().save_pretrained(tmp_path / "base")
    refused(tmp_path, r"\(GPT2LMHeadModel\) has no layer model.layers.0.mlp.down_proj")


def test_weights_trained_whole_of_another_shape_are_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    llama(vocab_size=70).save_pretrained(tmp_path / "base")
    refused(tmp_path, r"lm_head.weight is \[70, 32\] in the base and \[61, 32\] in the adapter")


def test_a_torn_base_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    path = tmp_path / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path, "cannot be read .* fetch it again")


def test_a_missing_shard_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS, shard="20KB")
    next(iter(sorted((tmp_path / "base").glob("*.safetensors")))).unlink()
    refused(tmp_path, "lacks model-00001-of-.*which its index names")


def test_weights_that_are_pickled_are_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "pytorch_model.bin")
    refused(tmp_path, "has pytorch_model.bin, but no model.safetensors")


def test_a_quantised_base_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {}}))
    refused(tmp_path, "holds weights of few bits")


def test_nan_in_the_base_leaves_nothing(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    refused(tmp_path, "layers.1.self_attn.q_proj would hold numbers that are not finite")


def test_a_target_that_holds_something_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("mine")
    with pytest.raises(HirankError, match="out is there already"):
        merge(tmp_path, "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a"]


def test_stochastic_rounding_to_another_dtype_is_refused(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    refused(tmp_path, "Stochastic rounding is to bfloat16, and .* is written as float32", seed=0)


def test_an_interrupted_merge_leaves_no_folder(tmp_path: Path):
    save_pair(tmp_path, llama(), target_modules=LINEARS)
    base, adapter = BaseFolder(tmp_path / "base"), AdapterFolder(tmp_path / "adapter")
    seen: list[str] = []

    def interrupt(name: str, *_: Any) -> None:
        seen.append(name)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_merged(plan_merge(base, adapter, Rounding()), tmp_path / "out", interrupt)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]
