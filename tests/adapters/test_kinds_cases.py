"""Cases users reported of layers that are not nn.Linear (see the numbers): right, every one."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import hirank
from adapters.layer_kinds import Holder, conv1d, effective, parts_of, reference
from adapters.setups import layer_of, pair, perturb, stock, wrap
from hirank.testing import relative_rms
from recorder import OpLog

pytestmark = pytest.mark.filterwarnings(
    "ignore:LoRA adapter added to ConvNd layer:UserWarning",
    "ignore:fan_in_fan_out is set to False:UserWarning",
)


def tiny_gpt2():
    config = GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=1
    )
    return GPT2LMHeadModel(config)


def adapted_gpt2(**config):
    settings = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    model = get_peft_model(tiny_gpt2(), LoraConfig(r=4, use_dora=True, **(settings | config)))
    return hirank.accelerate(perturb(model))


def test_d23_unmerge_on_gpt2():
    model = adapted_gpt2().eval()
    ids = torch.arange(12)[None]
    assert {row.tier for row in hirank.explain(model).rows} == {"eager"}
    logits = model(ids).logits.detach()
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if "base_layer" in n}
    model.merge_adapter()
    assert relative_rms(model(ids).logits, logits) < 1e-5
    model.unmerge_adapter()
    assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)
    model.merge_adapter()
    with model.disable_adapter():
        plain = model(ids).logits
    assert relative_rms(plain, unwrapped(model)(ids).logits) < 1e-6


def unwrapped(model):
    return copy.deepcopy(model).unload()


def test_gpt2_trains_as_stock_does():
    ours = adapted_gpt2(target_modules=["c_attn", "c_proj", "c_fc", "wte"]).train()
    theirs = hirank.restore(copy.deepcopy(ours))
    ids, losses = torch.arange(12)[None], []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        torch.manual_seed(0)
        for _ in range(4):
            with torch.random.fork_rng():
                loss = model.eval()(ids, labels=ids).loss  # GPT-2 has dropout of its own
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_d24_conv1d_that_is_not_square(fan_in_fan_out):
    model = perturb(wrap(Holder(conv1d(24, 16)), fan_in_fan_out=fan_in_fan_out))
    x = torch.randn(5, 16)
    assert layer_of(model).lora_magnitude_vector["default"].weight.shape == (24,)
    y = model(x).detach()
    assert relative_rms(y, reference(model, x)) < 1e-6
    assert relative_rms(model.merge_and_unload()(x).detach(), y) < 1e-6


def test_d43_grouped_convolution():
    theirs, ours = pair(Holder(nn.Conv2d(8, 8, 3, groups=2, padding=1, bias=False)))
    x = torch.randn(2, 8, 6, 6)
    dense = effective(parts_of(layer_of(ours)))
    assert dense.shape == (8, 8, 3, 3)
    assert relative_rms(ours(x).detach(), F.conv2d(x.double(), dense, padding=1)) < 1e-6
    # PEFT reshapes B A as if there were no groups, and so divides by another norm
    assert relative_rms(theirs(x).detach(), F.conv2d(x.double(), dense, padding=1)) > 1e-3
    with pytest.raises(NotImplementedError, match="groups > 1"):
        ours.merge_adapter()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
@pytest.mark.parametrize("dims", [1, 2])
def test_d44_padding_mode(dims, mode, stride):
    kind, size = {1: (nn.Conv1d, (9,)), 2: (nn.Conv2d, (7, 9))}[dims]
    base = Holder(kind(4, 4, 3, padding=1, padding_mode=mode, stride=stride))
    model, x = perturb(wrap(base)).eval(), torch.randn(2, 4, *size)
    y = model(x).detach()
    model.merge_adapter()
    assert relative_rms(model(x), y) < 1e-6


@pytest.mark.parametrize("dims", [1, 2])
def test_d44_dilation(dims):
    kind, size = {1: (nn.Conv1d, (9,)), 2: (nn.Conv2d, (7, 9))}[dims]
    model = perturb(wrap(Holder(kind(4, 4, 3, padding=2, dilation=2))))
    x = torch.randn(2, 4, *size)
    assert relative_rms(model(x).detach(), reference(model, x)) < 1e-6


@pytest.mark.parametrize("dropout", ["peft", "single-gemm"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_d45_dropout_on_a_bf16_convolution(dims, dropout):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = stock(Holder(kind(4, 4, 3)).bfloat16(), lora_dropout=0.1)
    hirank.accelerate(perturb(model), dropout=dropout).train()
    x = torch.randn(2, 4, *[6] * dims).bfloat16().requires_grad_()
    y = model(x)
    assert y.dtype == torch.bfloat16 and torch.isfinite(y).all()
    y.sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert all(torch.isfinite(g).all() for g in grads)
    assert relative_rms(model.eval()(x).detach(), reference(model, x.detach())) < 4 * 2.0**-9


@pytest.mark.parametrize("way", ["peft", "single-gemm"])
def test_dropout_of_a_convolution_means_what_it_says(way):
    model = stock(Holder(nn.Conv2d(4, 6, 3, bias=True)), lora_dropout=0.4)
    hirank.accelerate(perturb(model), dropout=way).train()
    layer, x = layer_of(model), torch.randn(2, 4, 7, 7)
    torch.manual_seed(3)
    dropped = layer.lora_dropout["default"](x)
    parts = parts_of(layer)
    bias = parts.bias.view(-1, 1, 1)
    frozen = F.conv2d(x.double(), parts.weight)
    lora = parts.scale * F.conv2d(F.conv2d(dropped.double(), parts.A), parts.B)
    plain = parts._replace(m=None)
    gain = parts.m / effective(plain).flatten(1).norm(dim=1).view(1, -1, 1, 1)
    if way == "peft":
        other = F.conv2d(dropped.double(), parts.weight)
        truth = frozen + (gain - 1) * other + gain * lora + bias
    else:
        truth = gain * (frozen + lora) + bias
    torch.manual_seed(3)
    with OpLog() as log:
        y = model(x)
    assert relative_rms(y.detach(), truth) < 1e-6
    runs = [op for op in log.ops if op.name.startswith("aten::convolution")]
    large = [op for op in runs if any(shape == (6, 4, 3, 3) for _, shape in op.inputs)]
    assert len(large) == (2 if way == "peft" else 1)


def test_d47_embedding():
    model = perturb(wrap(Holder(nn.Embedding(32, 16, padding_idx=0))))
    ids = torch.arange(32).view(4, 8)
    assert layer_of(model).lora_magnitude_vector["default"].weight.shape == (16,)
    y = model(ids).detach()
    assert relative_rms(y, effective(parts_of(layer_of(model)))[ids]) < 1e-6
    assert relative_rms(model.merge_and_unload()(ids).detach(), y) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_d47_no_dense_product_in_training(dtype):
    model = perturb(wrap(Holder(nn.Embedding(4096, 32).to(dtype)))).train()
    with OpLog() as log:
        model(torch.randint(0, 4096, (8,)))
    assert not log.made(None, (4096, 32))
