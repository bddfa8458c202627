"""Traps of gradients, precision and state, each walked into and mended."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import DoraCaching
from peft.tuners.lora import dora
from torch import nn

import hirank
from doctor.cases import Idle, adamw, case, named, reentrant, wrap
from helpers import tiny_llama

# Gradients.


@case("none of")
def nothing_trainable(tmp: Path):
    wrap().save_pretrained(tmp)
    yield {"model": PeftModel.from_pretrained(tiny_llama(), tmp)}
    yield {"model": PeftModel.from_pretrained(tiny_llama(), tmp, is_trainable=True)}


@case("checkpoint reentrantly")
def no_input_gradients(tmp: Path):
    model = reentrant()
    yield {"model": model}
    model.enable_input_require_grads()
    yield {"model": model}


@case("1,024 numbers in 1 weights: base_model.model.model.layers.1.self_attn.q_proj.base_layer")
def base_weights_trainable(tmp: Path):
    model = wrap()
    stray = model.base_model.model.model.layers[1].self_attn.q_proj.base_layer.weight
    stray.requires_grad_(True)
    yield {"model": model}
    stray.requires_grad_(False)
    yield {"model": model}


@case("14 of 42 trainable weights")
def optimizer_misses_trainable(tmp: Path):
    model = wrap(use_dora=True)
    yield {
        "model": model,
        "optimizer": torch.optim.AdamW(named(model, "lora_A") + named(model, "lora_B"), lr=2e-4),
    }
    yield {"model": model, "optimizer": adamw(model)}


@case("28 of 28 weights, of shapes", along=("optimizer-misses-trainable",))
def optimizer_holds_strangers(tmp: Path):
    optimizer = adamw(wrap())
    model = wrap()
    yield {"model": model, "optimizer": optimizer}
    yield {"model": model, "optimizer": adamw(model)}


@case("21 weights: base_model.model.model.embed_tokens.weight")
def optimizer_holds_frozen(tmp: Path):
    model = wrap()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    yield {"model": model, "optimizer": optimizer}
    yield {"model": model, "optimizer": adamw(model)}


@case("1 of 1 parameter groups")
def learning_rate_zero(tmp: Path):
    model = wrap()
    yield {"model": model, "optimizer": adamw(model, lr=0.0)}
    warming = adamw(model)
    torch.optim.lr_scheduler.LambdaLR(warming, lambda step: step / 10)
    assert warming.param_groups[0]["lr"] == 0
    yield {"model": model, "optimizer": warming}


@case("2 processes, 14 adapters without gradients", along=("inactive-trainable",))
def unused_under_ddp(tmp: Path):
    model = wrap()
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    model.set_requires_grad("other")
    yield {"model": model, "world_size": 2}
    model.set_adapter("default")
    yield {"model": model, "world_size": 2}


@case("1 of 2 for this batch: pooler")
def adapter_never_runs(tmp: Path):
    batch = {"x": torch.randn(2, 16)}
    yield {"model": wrap(Idle(), target_modules=["used", "pooler"], task_type=None), "batch": batch}
    yield {"model": wrap(Idle(), target_modules=["used"], task_type=None), "batch": batch}


# Precision.


@case("of the entries of lora_magnitude_vector", along=("half-magnitude",))
def updates_round_away(tmp: Path):
    model = wrap(use_dora=True)
    for p in named(model, "lora_"):
        p.data = p.data.bfloat16()
    yield {"model": model, "optimizer": adamw(model, lr=1e-5)}
    for p in named(model, "lora_"):
        p.data = p.data.float()
    yield {"model": model, "optimizer": adamw(model, lr=1e-5)}


@case("14 layers store it as bfloat16, whose neighbouring numbers are up to 0.78% apart")
def half_magnitude(tmp: Path):
    model = wrap(use_dora=True)
    magnitudes = named(model, "lora_magnitude_vector")
    for p in magnitudes:
        p.data = p.data.bfloat16()
    yield {"model": model}
    for p in magnitudes:
        p.data = p.data.float()
    yield {"model": model}


@case("1 layers store it as bfloat16")
def half_magnitude_on_quantised_base(tmp: Path):
    model = wrap(Idle(), target_modules=["used"], use_dora=True, task_type=None)
    layer = model.base_model.model.used
    packed = torch.zeros(128, 1, dtype=torch.uint8)  # as bitsandbytes stores 4 bits
    layer.base_layer.weight = nn.Parameter(packed, requires_grad=False)
    magnitude = layer.lora_magnitude_vector["default"].weight
    magnitude.data = magnitude.data.bfloat16()
    yield {"model": model}
    magnitude.data = magnitude.data.float()
    yield {"model": model}


@case("28 trained weights are float16")
def fp16_weights_with_scaler(tmp: Path):
    model = wrap()
    for p in named(model, "lora_"):
        p.data = p.data.half()
    yield {"model": model, "scaler": torch.amp.GradScaler("cpu")}
    for p in named(model, "lora_"):
        p.data = p.data.float()
    yield {"model": model, "config": {"fp16": True}}


@case("1 weights: model.layers.0.self_attn.q_proj.lora_B")
def weights_not_finite(tmp: Path):
    model = wrap()
    with torch.no_grad():
        named(model, "layers.0.self_attn.q_proj.lora_B")[0][3, 1] = float("nan")
    yield {"model": model}
    with torch.no_grad():
        named(model, "layers.0.self_attn.q_proj.lora_B")[0].zero_()
    yield {"model": model}


@case("2 rows in 1 layers: model.layers.0.self_attn.o_proj")
def zero_rows(tmp: Path):
    base = tiny_llama()
    with torch.no_grad():
        base.model.layers[0].self_attn.o_proj.weight[[3, 5]] = 0
    model = wrap(base, use_dora=True)
    yield {"model": model}
    yield {"model": hirank.accelerate(model)}


# State.


@case("14 layers: model.layers.0.self_attn.q_proj")
def merged_while_training(tmp: Path):
    model = wrap()
    model.merge_adapter()
    yield {"model": model}
    model.unmerge_adapter()
    yield {"model": model}


@case("active and trainable: default, other")
def several_trained_at_once(tmp: Path):
    model = wrap()
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "other"])
    yield {"model": model}
    model.set_adapter("default")
    yield {"model": model}


@case("other on 14 layers")
def inactive_trainable(tmp: Path):
    model = wrap()
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    model.set_requires_grad("other")
    yield {"model": model}
    model.set_requires_grad("other", requires_grad=False)
    yield {"model": model}


@case("14 layers of PEFT's use it")
def stale_dora_cache(tmp: Path):
    model = wrap(use_dora=True)
    with DoraCaching():
        yield {"model": model}
    assert not dora.ENABLE_DORA_CACHING
    yield {"model": model}


@case("14 of 14 layers")
def adapter_on_meta(tmp: Path):
    model = get_peft_model(
        tiny_llama(),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
        low_cpu_mem_usage=True,
    )
    yield {"model": model}
    yield {"model": wrap()}


@case("1 of 14 layers: model.layers.1.mlp.down_proj")
def factors_both_zero(tmp: Path):
    model = wrap()
    (A,) = named(model, "layers.1.mlp.down_proj.lora_A")
    with torch.no_grad():
        A.zero_()
    yield {"model": model}
    nn.init.kaiming_uniform_(A)
    yield {"model": model}


@case("14 layers: model.layers.0.self_attn.q_proj")
def dora_without_magnitude(tmp: Path):
    model = wrap()
    model.peft_config["default"].use_dora = True
    yield {"model": model}
    yield {"model": wrap(use_dora=True)}


@case("14 layers: model.layers.0.self_attn.q_proj")
def magnitude_frozen(tmp: Path):
    model = wrap(use_dora=True)
    for p in named(model, "lora_magnitude_vector"):
        p.requires_grad_(False)
    yield {"model": model}
    for p in named(model, "lora_magnitude_vector"):
        p.requires_grad_(True)
    yield {"model": model}


@case("lora_dropout 0.1 on 14 layers: 36,864 more operations for each token")
def dropout_second_gemm(tmp: Path):
    model = wrap(use_dora=True, lora_dropout=0.1)
    yield {"model": hirank.accelerate(model)}
    yield {"model": hirank.accelerate(model, dropout="single-gemm")}


@case("14 of 14 dropouts do nothing, the first with p = 0.1")
def dropout_in_eval(tmp: Path):
    model = wrap(lora_dropout=0.1).eval()
    yield {"model": model, "optimizer": adamw(model)}
    yield {"model": model.train(), "optimizer": adamw(model)}
