"""The law of the first step, against steps that stock PEFT layers take."""

import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from typer.testing import CliRunner

from helpers import chat_rows, tiny_llama, write_jsonl
from hirank.audit.first_step import first_steps
from hirank.audit.scaling import (
    Setting,
    advise,
    compared,
    magnitude_share,
    parse_setting,
    power_of,
    step_size,
)
from hirank.cli import app
from hirank.errors import HirankError

ROWS, WIDTH = 64, 1024
SETTINGS = [
    Setting(4, 8),
    Setting(16, 8),
    Setting(16, 8, rslora=True),
    Setting(2, 1, dora=True),
    Setting(8, 16, dora=True, b_ratio=4),
]


def taken(setting: Setting, power: int, lr: float) -> float:
    """The step of a row of W that stock PEFT takes against a random gradient, in the law's units:
    lr, and for SGD the gradient's length over sqrt(K)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, ROWS, bias=False)).double()
    config = LoraConfig(
        r=setting.rank,
        lora_alpha=setting.alpha,
        use_rslora=setting.rslora,
        use_dora=setting.dora,
        target_modules=["0"],
    )
    peft = get_peft_model(model, config, autocast_adapter_dtype=False)
    before = weight_of(peft)
    gradient = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    # the loss whose gradient by the adapted weight is `gradient`
    (peft(torch.eye(WIDTH, dtype=torch.float64)).T * gradient).sum().backward()
    groups = [
        {"params": [p], "lr": lr * (1 if "lora_A" in name else setting.b_ratio)}
        for name, p in peft.named_parameters()
        if p.requires_grad
    ]
    kind = torch.optim.SGD if power == 2 else torch.optim.Adam
    kind(groups).step()
    step = (weight_of(peft) - before).norm() / math.sqrt(ROWS) / lr
    length = gradient.norm() / math.sqrt(ROWS) / math.sqrt(WIDTH)
    return float(step / (length if power == 2 else 1))


@torch.no_grad()
def weight_of(model: nn.Module) -> Tensor:
    return model(torch.eye(WIDTH, dtype=torch.float64)).T


@pytest.mark.parametrize("power", [1, 2], ids=["adam", "sgd"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_law_is_what_stock_peft_does(setting: Setting, power: int):
    # a row of A is 1/sqrt(3) long on average, and its ranks are orthogonal up to r / K
    width = 1 + setting.rank / WIDTH
    assert taken(setting, power, 1e-6) == pytest.approx(step_size(setting, power) * width, rel=0.04)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("after", SETTINGS, ids=str)
def test_advice_keeps_the_step(after: Setting, power: int):
    before = Setting(16, 64, dora=True, lr=2e-4)
    after = replace(after, lr=2e-4)
    advice = advise(before, after, power)
    wanted = step_size(before, power)
    assert step_size(replace(after, lr=advice.lr), power) == pytest.approx(wanted)
    assert step_size(after, power) == pytest.approx(wanted * advice.ratio)
    assert advice.alpha is not None
    assert step_size(replace(after, alpha=advice.alpha), power) == pytest.approx(wanted)


def test_no_alpha_is_small_enough_for_the_magnitudes():
    advice = advise(Setting(4, 1), Setting(4, 1, dora=True), 1)
    assert advice.alpha is None and 0.5 < magnitude_share(advice.after, 1) < 1


@pytest.mark.parametrize(
    ("after", "optimizer", "ratio"),
    [
        ("r64a64", "adamw", 1.0),
        ("r64a64", "SGD", 0.5),
        ("r64a32", "paged_adamw_8bit", 0.5),
        ("r64a8:rslora", "adamw_torch_fused", 1.0),
        ("R64A128", "lion_8bit", 2.0),
    ],
)
def test_from_r16a32(after: str, optimizer: str, ratio: float):
    assert compared("r16a32", after, optimizer).ratio == pytest.approx(ratio)


def test_lora_plus_multiplies_the_step():
    assert compared("r16a32", "r16a32", "adamw", b_ratio=16).ratio == pytest.approx(16)


def test_how_a_setting_is_written():
    assert parse_setting(" r16a0.5 ", rslora=True) == Setting(16, 0.5, rslora=True)
    assert parse_setting("r8a8:lora", rslora=True, dora=True) == Setting(8, 8)
    assert parse_setting("r8a8:rslora:dora") == Setting(8, 8, rslora=True, dora=True)
    assert str(parse_setting("r8a8:rslora:dora")) == "r8a8:rslora:dora"


@pytest.mark.parametrize("text", ["", "r16", "a32", "r0a1", "r16a0", "r16a32:pissa", "r1.5a2"])
def test_no_setting(text: str):
    with pytest.raises(HirankError, match="such as r16a32"):
        parse_setting(text)


@pytest.mark.parametrize("name", ["muon", "", "sgd_of_mine", "adagrad"])
def test_no_law(name: str):
    with pytest.raises(HirankError, match="give one of sgd, adam"):
        power_of(name)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"b_ratio": 0.0}, {"lr": math.nan}])
def test_a_rate_that_moves_nothing(wrong: dict[str, float]):
    with pytest.raises(HirankError, match="above 0"):
        compared("r16a32", "r16a32", "adamw", **wrong)


# On a model.


def test_measured_on_a_model_with_a_batch():
    model = tiny_llama(hidden=256, layers=1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    ids = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
    pair = [Setting(4, 8, lr=1e-5), Setting(4, 64, dora=True, lr=1e-5)]
    one, other = first_steps(model, pair, {"input_ids": ids, "labels": ids})
    assert other / one == pytest.approx(advise(*pair, 1).ratio, rel=0.02)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# The command.


def call(*words: object):
    return CliRunner().invoke(app, ["audit", "scaling", *map(str, words)])


def test_the_command_answers_in_a_table_and_a_sentence():
    done = call("--from", "r16a32", "--to", "r64a32", "--lr", 2e-4)
    assert done.exit_code == 0 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == (
        "With adamw, the first step of r64a32 is 0.5 times that of r16a32: to keep it, take the "
        "learning rate 0.0004 (2 x that of r16a32), or alpha 64."
    )


def test_the_command_measures(tmp_path, tiny_model_dir):
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(3))
    pair = ("--from", "r2a4", "--to", "r2a8")
    done = call(*pair, "--model", tiny_model_dir, "--data", data)
    assert done.exit_code == 0, done.output
    assert "with 3 rows" in done.stdout and done.stdout.endswith("2 times.\n")
    assert call(*pair, "--model", tiny_model_dir).exit_code == 2
    assert call(*pair, "--model", tiny_model_dir, "--data", tmp_path / "no.jsonl").exit_code == 2
