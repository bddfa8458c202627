"""The figures of docs/claims.md, at sizes that take no time."""

import inspect
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from helpers import tiny_llama
from hirank.audit.scaling import Setting, step_size
from hirank.bench.optim_memory import LivePeak

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def claims():
    """examples/claims, whose two modules import each other by their bare names."""
    sys.path.insert(0, str(ROOT / "examples" / "claims"))
    try:
        import experiments
        import reproduce

        yield experiments, reproduce
    finally:
        sys.path.pop(0)
        del sys.modules["experiments"], sys.modules["reproduce"]


@pytest.fixture
def experiments(claims) -> ModuleType:
    return claims[0]


# The experiments.


def test_the_first_step_falls_62_and_3_8_times(experiments: ModuleType):
    steps = experiments.first_steps((4, 64), rows=256, width=1024)
    assert experiments.fall(steps, "SGD") == pytest.approx(62, rel=0.05)
    assert experiments.fall(steps, "Adam") == pytest.approx(3.8, rel=0.05)


@pytest.mark.parametrize(("optimizer", "power"), [("SGD", 2), ("Adam", 1)])
def test_the_law_of_the_audit_gives_that_fall(experiments: ModuleType, optimizer, power):
    steps = experiments.first_steps((4, 64), rows=256, width=1024)
    law = step_size(Setting(4, 16), power) / step_size(Setting(64, 16), power)
    assert law == pytest.approx(experiments.fall(steps, optimizer), rel=0.05)


def test_adam_ends_on_the_floor(experiments: ModuleType):
    (fit,) = experiments.adam_fits([4], size=24, steps=300)
    assert fit["floor"] == pytest.approx(0.379, abs=1e-3)
    assert fit["floor"] <= fit["best"] + 1e-6 and fit["best"] < fit["floor"] * 1.001


def test_adam_rebounds_from_a_floor_of_zero(experiments: ModuleType):
    (fit,) = experiments.adam_fits([8], size=24, steps=1200)
    assert fit["floor"] < 1e-12 and fit["best"] < 1e-5
    assert fit["worst_after"] > 100 * fit["best"]


def test_peft_counts_the_published_parameters(claims):
    experiments, reproduce = claims
    for (model, targets), published in reproduce.PUBLISHED_COUNTS.items():
        config, names = reproduce.MODELS[model], experiments.TARGETS[targets]
        one = experiments.parameter_counts(config(1), names, 16)  # layers are alike
        assert [layers_of(config()) * one, 4 * layers_of(config()) * one] == list(published)


def test_dora_adds_a_number_an_output(experiments: ModuleType):
    one = experiments.parameter_counts(
        experiments.qwen2_5_7b(1), experiments.TARGETS["all linear"], 16, dora=True
    )
    assert 28 * one == 41_760_768


@pytest.mark.parametrize("setting", [(16, 32), (64, 64), (64, 16), (256, 16)], ids=str)
def test_distortion_goes_with_the_scale(experiments: ModuleType, setting):
    got = experiments.bf16_distortion(*setting, size=512)
    # a step of bf16 is 2^-7 of the power of two below the weight: 0.72 of a Gaussian one, in RMS
    rounding = 0.02 * 2**-7 * math.sqrt(1 / 12) * 0.72
    assert got["fp32_base"] == pytest.approx(rounding / got["rms"], rel=0.1)
    assert (got["fp32_base"] > 1) == (setting == (256, 16))


def test_a_bf16_base_bounds_the_distortion():
    torch.manual_seed(0)
    base = (0.02 * torch.randn(512, 512)).bfloat16()
    for size in (1e-6, 1e-5, 1e-4, 1e-3):
        step = size * torch.randn(512, 512)
        off = (base.float() + step).bfloat16().float() - base.float() - step
        assert bool((off.abs() <= step.abs() * (1 + 1e-3) + 1e-9).all())


def layers_of(config) -> int:
    return config.num_hidden_layers


# Figures that are wrong.


def total(config, layers: int) -> int:
    """Parameters of a model with so many layers, from models with one and two."""
    sizes = [sum(p.numel() for p in config(n).parameters()) for n in (1, 2)]
    return sizes[0] + (layers - 1) * (sizes[1] - sizes[0])


def test_qwen_has_an_ffn_of_18944(experiments: ModuleType):
    def made(intermediate: int) -> int:
        shapes = experiments.qwen2_5_7b
        return total(lambda n: experiments.on_meta(shapes(n, intermediate)), 28)

    assert (made(18944), made(18928)) == (7_615_616_512, 7_610_799_616)


def test_qwen_has_narrow_keys_and_values(experiments: ModuleType):
    model = experiments.on_meta(experiments.qwen2_5_7b(1))
    shapes = {n.rpartition(".")[2]: m.weight.shape for n, m in model.model.layers.named_modules()
              if isinstance(m, nn.Linear)}  # fmt: skip
    assert shapes["k_proj"] == shapes["v_proj"] == (512, 3584)
    assert 28 * 64 * sum(map(sum, shapes.values())) == 161_480_704
    wrong = 28 * 64 * (4 * 2 * 3584 + 3 * (3584 + 18928))
    assert wrong == 172_404_736


def test_bytes_of_a_gradient_and_its_bases():
    with torch.device("meta"):
        assert torch.empty(4096, 4096).nbytes == 67_108_864
        assert torch.empty(4096, 128).nbytes == 2_097_152


def linears(hidden: int, ffn: int) -> list[tuple[int, int]]:
    """(shorter side, longer side) of the matrices of a block without grouped queries."""
    return [(hidden, hidden)] * 4 + [(hidden, ffn)] * 3


def test_galore_of_a_7b_is_19_gb_before_anything_runs():
    rank, layers, block, ends = 1024, 32, linears(4096, 11008), 2 * 32000 * 4096
    norms = (2 * layers + 1) * 4096
    weights = 2 * (layers * sum(m * n for m, n in block) + ends + norms)
    bases = 2 * layers * sum(m * rank for m, _ in block)
    moments = 2 * (layers * sum(n * rank for _, n in block) + ends)
    assert weights / 1e9 == pytest.approx(13.48, abs=0.005)
    assert (weights + bases + moments) / 1e9 == pytest.approx(19.1, abs=0.05)


@pytest.mark.parametrize(
    ("hidden", "ffn", "layers", "rank", "printed", "rebuilt"),
    [
        (512, 1376, 8, 128, 0.13, 0.164),
        (768, 2048, 12, 256, 0.28, 0.343),
        (1024, 2736, 24, 256, 0.54, 0.653),
        (2048, 5461, 24, 512, 1.78, 2.085),
    ],
)
def test_galores_formula_does_not_give_galores_table(hidden, ffn, layers, rank, printed, rebuilt):
    projected = layers * sum((m + 2 * n) * rank for m, n in linears(hidden, ffn))
    whole = 2 * (2 * 32000 * hidden)  # two moments of embedding and head
    assert 2 * (projected + whole) / 1e9 == pytest.approx(rebuilt, abs=1e-3)
    assert 1.16 < rebuilt / printed < 1.27


def test_estimate_memory_knows_the_size_alone():
    estimate = pytest.importorskip("accelerate.commands.estimate").estimate_training_usage
    asked = set(inspect.signature(estimate).parameters)
    assert asked == {"bytes", "mixed_precision", "msamp_config"}
    assert estimate(100, "float32") == dict(model=100, gradients=100, optimizer=200, step=400)


def test_nf4_of_qwen_is_5_55_gb(experiments: ModuleType):
    quantise = pytest.importorskip("bitsandbytes").functional.quantize_4bit
    codes, state = quantise(
        torch.randn(1024, 1024).bfloat16(), compress_statistics=True, quant_type="nf4", blocksize=64
    )
    held = codes.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    bits = 8 * held / 1024**2
    assert bits == pytest.approx(4.127, abs=1e-3)
    linears = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
    rest = 7_615_616_512 - linears
    assert (linears * bits / 8 + 2 * rest) / 1e9 == pytest.approx(5.55, abs=0.005)


def test_a_logit_costs_14_bytes():
    tokens, words = 32, 4096
    hidden = torch.randn(1, tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(words, 8, dtype=torch.bfloat16)
    with LivePeak() as memory:
        logits = hidden @ head.T  # a model's output holds them until the step is over
        ForCausalLMLoss(logits, torch.zeros(1, tokens, dtype=torch.long), words).backward()
    assert memory.peak / (tokens * words) == pytest.approx(14, abs=0.1)


def test_adapters_are_fp32_on_a_bf16_model():
    model = get_peft_model(
        tiny_llama(dtype=torch.bfloat16), LoraConfig(target_modules="all-linear")
    )
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_lora_saves_no_activations():
    def kept(model: nn.Module) -> int:
        found: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            place = tensor.untyped_storage()
            if place.data_ptr() not in weights:
                found[place.data_ptr()] = place.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return model(torch.randn(64, 32)).sum().backward() or sum(found.values())

    def stack() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))

    config = LoraConfig(r=4, target_modules=["0", "1", "2"])
    assert kept(get_peft_model(stack(), config)) > kept(stack())


# The page.


def test_the_tables_are_what_is_on_record(claims):
    assert claims[1].main(["--check"]) == 0


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", PAGE)
    assert len(named) >= 11
    for file, name in named:
        text = (ROOT / (file or "tests/audit/test_claims.py")).read_text(encoding="utf-8")
        assert f"def {name}(" in text, name
