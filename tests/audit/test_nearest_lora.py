"""The exported LoRA is the best of its rank, against a dense SVD; and stock PEFT loads it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from helpers import tiny_llama
from hirank.adapters.base_files import BaseFolder
from hirank.adapters.files import AdapterFolder
from hirank.adapters.merge_files import write_merged
from hirank.adapters.merge_plan import plan_merge
from hirank.audit.nearest_lora import lora_of_adapter, lora_of_model
from hirank.cli import app
from hirank.errors import HirankError

pytestmark = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out is set to", "ignore:Setting `save_embedding_layers`"
)


def gpt2() -> Any:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    return GPT2LMHeadModel(config)


def save_pair(folder: Path, model: Any, **lora: Any) -> Path:
    """`base`, and a DoRA `adapter` on it whose gains are not 1."""
    torch.manual_seed(0)
    model.save_pretrained(folder / "base")
    config = LoraConfig(**{"r": 3, "lora_alpha": 6, "use_dora": True} | lora)
    wrapped = get_peft_model(model, config)
    wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    wrapped.save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj", "embed_tokens"]
    return save_pair(tmp_path_factory.mktemp("llama"), tiny_llama(), target_modules=targets)


def increment(folder: Path, name: str) -> Tensor:
    """g (W + s B A) - W in fp64, as [N, K]."""
    layer = AdapterFolder(folder / "adapter").layer(name)
    weight = BaseFolder(folder / "base").weight(f"{name}.weight").double()
    weight = weight.T if layer.kind == "embedding" or "c_attn" in name else weight
    adapted = weight + layer.scale * layer.B.double() @ layer.A.double()
    assert layer.magnitude is not None
    return layer.magnitude.double()[:, None] * adapted / adapted.norm(dim=1)[:, None] - weight


@pytest.mark.parametrize("rank", [1, 3, 6, 12])
def test_each_layer_is_the_best_of_its_rank(llama: Path, tmp_path: Path, rank: int):
    found = lora_of_adapter(llama / "adapter", llama / "base", tmp_path / "lora", rank=rank)
    made = AdapterFolder(tmp_path / "lora")
    assert made.names == AdapterFolder(llama / "adapter").names
    for told in found.layers:
        wanted, layer = increment(llama, told.name), made.layer(told.name)
        values = torch.linalg.svdvals(wanted)
        best = float(values[rank:].norm() / values.norm())
        error = float((layer.scale * layer.B.double() @ layer.A.double() - wanted).norm())
        assert told.error == pytest.approx(error / float(values.norm()), rel=1e-3, abs=1e-6)
        assert told.error == pytest.approx(best, rel=1e-3, abs=1e-5)
        assert layer.magnitude is None and layer.rank == min(rank, *wanted.shape)


def test_the_error_falls_with_the_rank_to_nothing(llama: Path, tmp_path: Path):
    """D62."""
    errors = [
        lora_of_adapter(llama / "adapter", llama / "base", tmp_path / f"{r}", rank=r).error
        for r in (3, 6, 12, 256)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < 0.05 < errors[0]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(20).reshape(2, 10)).logits


@pytest.mark.parametrize(
    ("build", "targets"),
    [(tiny_llama, ["q_proj", "down_proj", "embed_tokens"]), (gpt2, ["c_attn", "c_fc", "wte"])],
)
def test_stock_peft_computes_with_it_what_dora_did(tmp_path: Path, build: Any, targets: list[str]):
    torch.manual_seed(0)
    save_pair(tmp_path, build(), target_modules=targets)
    lora_of_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "lora", rank=512)
    models = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), place)
        for place in (tmp_path / "adapter", tmp_path / "lora")
    ]
    assert not models[1].peft_config["default"].use_dora
    torch.testing.assert_close(logits(models[1]), logits(models[0]), rtol=1e-4, atol=1e-4)


def test_a_merged_model_becomes_the_adapter_it_was(tmp_path: Path):
    """A LoRA, merged, then found again at its rank."""
    torch.manual_seed(0)
    targets = ["q_proj", "down_proj"]
    save_pair(tmp_path, tiny_llama(), target_modules=targets, use_dora=False)
    base, adapter = BaseFolder(tmp_path / "base"), AdapterFolder(tmp_path / "adapter")
    write_merged(plan_merge(base, adapter), tmp_path / "merged")
    found = lora_of_model(tmp_path / "merged", tmp_path / "base", tmp_path / "again", rank=3)
    assert found.error < 1e-4 and found.left_out == []
    again = AdapterFolder(tmp_path / "again")
    assert again.names == adapter.names
    for name in again.names:
        one, other = adapter.layer(name), again.layer(name)
        torch.testing.assert_close(
            other.scale * other.B @ other.A, one.scale * one.B @ one.A, rtol=1e-3, atol=1e-6
        )


def test_what_no_lora_reaches_is_told(tmp_path: Path):
    torch.manual_seed(0)
    model = tiny_llama()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.model.norm.weight.add_(0.1)
        model.model.layers[0].mlp.up_proj.weight.add_(0.1)
    model.save_pretrained(tmp_path / "tuned")
    found = lora_of_model(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=2)
    assert found.left_out == ["model.norm.weight"]
    assert [layer.name for layer in found.layers] == ["model.layers.0.mlp.up_proj"]
    assert found.error < 1e-5  # a constant has rank 1


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("parted", [False, True])
def test_a_shared_weight_is_reached_from_both_of_its_ends(tmp_path: Path, parted: bool):
    """A LoRA of the embedding alone would leave the head that shares its weight behind."""
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.02 * torch.randn(320, 32))
    if parted:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight + 0.01)
    model.save_pretrained(tmp_path / "tuned")
    found = lora_of_model(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=32)
    assert {layer.name for layer in found.layers} == {"model.embed_tokens", "lm_head"}
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "lora"
    )
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5
        )


def test_numbers_too_large_to_be_decomposed_are_refused(tmp_path: Path):
    for name, number in (("base", -3e38), ("tuned", 3e38)):
        model = tiny_llama()
        torch.nn.init.constant_(model.model.layers[0].mlp.up_proj.weight, number)
        model.save_pretrained(tmp_path / name)
    with pytest.raises(HirankError, match=r"up_proj holds numbers that are not finite or too"):
        lora_of_model(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=2)


def test_a_layer_above_the_limit_is_refused_by_name(llama: Path, tmp_path: Path):
    with pytest.raises(HirankError, match=r"of rank 1 misses .* in model.embed_tokens, more than"):
        lora_of_adapter(
            llama / "adapter", llama / "base", tmp_path / "lora", rank=1, max_error=0.01
        )
    assert list(tmp_path.iterdir()) == []


def call(*words: object) -> Any:
    return CliRunner().invoke(app, ["export", "lora", *map(str, words)])


def test_the_command(llama: Path, tmp_path: Path):
    done = call(llama / "adapter", "--rank", 8, "--out", tmp_path / "lora")
    assert done.exit_code == 0, done.output
    assert "A LoRA of rank 8 misses" in done.output and "Verified: it loads whole" in done.output
    assert (tmp_path / "lora" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{base}", "--rank", 4], "is no adapter: say with --base"),
        (["{lora}", "--rank", 4], "is a plain LoRA already"),
        (["{base}", "--base", "{base}", "--rank", 4], "there is nothing to export"),
        (["{adapter}", "--rank", 4, "--base", "/no/such"], "There is no model folder"),
    ],
)
def test_bad_input_is_one_sentence(llama: Path, tmp_path: Path, words: list[Any], said: str):
    lora_of_adapter(llama / "adapter", llama / "base", tmp_path / "l", rank=2)
    places = {"base": llama / "base", "adapter": llama / "adapter", "lora": tmp_path / "l"}
    filled = [word.format(**places) if isinstance(word, str) else word for word in words]
    done = call(*filled, "--out", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
