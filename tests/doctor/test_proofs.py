"""What the doctor says is what training then does."""

import copy

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hirank
from doctor.cases import Idle, adamw, named, reentrant, rows, trained, wrap
from helpers import tiny_llama
from hirank import diagnose
from hirank.doctor.precision import lost_share
from hirank.errors import HirankError


def met(model: nn.Module, **more) -> set[str]:
    return {finding.name for finding in diagnose(model, **more)}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_no_adapter_gets_a_gradient_through_a_reentrant_checkpoint():
    model = reentrant().train()
    assert met(model) == {"no-input-gradients"}
    loss = model(**rows()).loss
    assert not loss.requires_grad
    model.enable_input_require_grads()
    assert not met(model)
    model(**rows()).loss.backward()
    assert all(p.grad is not None for p in named(model, "lora_"))


@pytest.mark.parametrize("lr", [1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_share_that_rounds_away_is_what_adam_leaves_unchanged(dtype, lr):
    weight = nn.Parameter(torch.randn(4000).abs().add(0.2).to(dtype))
    said = lost_share(weight, lr)
    before = weight.detach().clone()
    optimizer = torch.optim.Adam([weight], lr=lr, eps=1e-12)
    weight.grad = torch.randn(4000).to(dtype)
    optimizer.step()
    assert abs(float((weight == before).float().mean()) - said) < 0.03


def test_float32_weights_lose_no_update():
    assert lost_share(torch.randn(4000), 1e-5) < 1e-3


def test_magnitudes_in_bfloat16_do_not_move_and_those_in_float32_do():
    def moved(dtype: torch.dtype) -> tuple[float, set[str]]:
        model = wrap(use_dora=True).train()
        magnitudes = named(model, "lora_magnitude_vector")
        for p in magnitudes:
            p.data = p.data.to(dtype)
        optimizer, before = adamw(model, lr=1e-5), copy.deepcopy(magnitudes)
        found = met(model, optimizer=optimizer)
        model(**rows()).loss.backward()
        optimizer.step()
        same = [a == b for a, b in zip(before, magnitudes, strict=True)]
        return 1 - float(torch.cat(same).float().mean()), found

    share, found = moved(torch.bfloat16)
    assert share < 0.01 and found == {"updates-round-away", "half-magnitude"}
    share, found = moved(torch.float32)
    assert share > 0.9 and not found


def test_the_scaler_refuses_what_the_doctor_names():
    model = wrap().train()
    for p in named(model, "lora_"):
        p.data = p.data.half()
    scaler, optimizer = torch.amp.GradScaler("cpu"), adamw(model)
    assert met(model, scaler=scaler) == {"fp16-weights-with-scaler"}
    scaler.scale(model(**rows()).loss).backward()
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.unscale_(optimizer)


def test_zero_rows_give_nan_in_pefts_dora_and_not_in_ours():
    base = tiny_llama()
    with torch.no_grad():
        base.model.layers[0].self_attn.o_proj.weight[3] = 0
    model = wrap(base, use_dora=True)
    assert met(model) == {"zero-rows"}
    assert model(**rows()).loss.isnan()
    assert not met(hirank.accelerate(model))
    assert model(**rows()).loss.isfinite()


def test_zero_rows_that_b_has_filled_are_no_trap():
    base = tiny_llama()
    with torch.no_grad():
        base.model.layers[0].self_attn.o_proj.weight[3] = 0
    model = wrap(base, use_dora=True)
    with torch.no_grad():
        named(model, "layers.0.self_attn.o_proj.lora_B")[0][3] = 0.1
    assert not met(model)


def test_a_second_base_product_is_as_large_as_said():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.ones(1, 8, dtype=torch.long))
        return counter.get_total_flops()

    model = wrap(use_dora=True, lora_dropout=0.1)
    (finding,) = diagnose(model)
    more = int(finding.evidence.split(": ")[1].split(" ")[0].replace(",", ""))
    assert flops(model.train()) - flops(model.eval()) == 8 * more


def test_a_wrapped_model_is_looked_into(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = wrap(Idle(), target_modules=["used", "pooler"], task_type=None)
        batch, both = {"x": torch.randn(2, 16)}, {"unused-under-ddp", "adapter-never-runs"}
        blind = DistributedDataParallel(model)
        assert met(blind, batch=batch, world_size=2) == both
        looking = DistributedDataParallel(model, find_unused_parameters=True)
        assert met(looking, batch=batch, world_size=2) == {"adapter-never-runs"}
    finally:
        torch.distributed.destroy_process_group()


def test_trainers_let_ddp_look_for_unused_parameters_unless_told_not_to():
    model = wrap(Idle(), target_modules=["used", "pooler"], task_type=None)
    batch = {"x": torch.randn(2, 16)}
    blind = {"ddp_find_unused_parameters": False, "world_size": 2}
    assert "unused-under-ddp" not in met(model, batch=batch, config={"world_size": 2})
    assert "unused-under-ddp" in met(model, batch=batch, config=blind)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own import
def test_a_compiled_model_is_looked_into():
    assert met(torch.compile(wrap(use_rslora=True, r=16, lora_alpha=64))) == {
        "scale-far-off",
        "adapter-larger-than-layer",
    }


def test_another_optimizers_steps_are_not_guessed():
    model = wrap(use_dora=True)
    for p in named(model, "lora_"):
        p.data = p.data.bfloat16()
    sgd = torch.optim.SGD(named(model, "lora_"), lr=1e-5)
    assert met(model, optimizer=sgd) == {"half-magnitude"}
    assert "updates-round-away" in met(model, config={"learning_rate": 1e-5})
    assert met(model, config={"learning_rate": 1e-5, "deepspeed": "z3.json"}) == {"half-magnitude"}


def test_one_changed_weight_of_a_resumed_adapter_is_seen(tmp_path):
    trained().save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)
    with torch.no_grad():
        nn.init.kaiming_uniform_(named(model, "layers.1.mlp.up_proj.lora_A")[0])
    (finding,) = diagnose(model, adapter_dir=tmp_path)
    assert finding.name == "resumed-from-scratch"
    assert "1 of 28 saved weights" in finding.evidence
    assert "every lora_B" not in finding.evidence


def test_it_says_that_nothing_was_resumed(tmp_path):
    trained().save_pretrained(tmp_path)
    (finding,) = diagnose(wrap(), adapter_dir=tmp_path)
    assert finding.evidence.endswith("every lora_B of the model is zero")


def test_errors_come_first_and_the_text_says_all():
    model = wrap(lora_alpha=0.1)
    with torch.no_grad():
        named(model, "lora_A")[0][0, 0] = float("inf")
    report = diagnose(model)
    assert [finding.level for finding in report] == ["error", "warning"]
    text = str(report)
    assert text.startswith("error: Adapter weights hold NaN or infinity [weights-not-finite]\n")
    assert text.endswith("1 error, 1 warning; looked at model, 14 adapted layers.")
    assert all(part in text for f in report for part in (f.title, f.evidence, f.fix, f.source))


def test_bad_input_is_one_sentence(tmp_path):
    for given, says in (
        ({}, "neither a model nor an adapter folder"),
        ({"model": "llama"}, "got a str"),
        ({"adapter_dir": tmp_path}, "has no adapter_config.json"),
    ):
        with pytest.raises(HirankError, match=says):
            diagnose(**given)
