"""A trace without numbers sees what a real step allocates, to the byte, and any depth from two."""

import pytest
import torch
from transformers import LlamaConfig

from hirank.errors import HirankError
from hirank.optim import rules, state
from hirank.plan import gpu
from hirank.plan.depth import peaks, peaks_at
from hirank.plan.setting import Setting
from hirank.plan.step import Run
from hirank.plan.subject import build, optimizer_for, with_depth
from hirank.plan.trace import moments_of, trace, trace_of

TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=160,
    tie_word_embeddings=False,
)

METHODS = {
    "full": {"method": "full", "loss": "plain"},
    "full, foreach": {"method": "full", "step": "foreach", "attention": "eager"},
    "lora": {"method": "lora", "accumulation": 2},
    "dora": {"method": "dora", "checkpointing": True, "loss": "plain"},
    "dora of PEFT": {"method": "dora-peft"},
    "galore": {"method": "galore", "step_in_backward": True},
    "qgalore": {"method": "qgalore"},
}


def setting(**changes):
    return Setting(**{"model": "tiny", "rank": 4, "sequence": 48, "batch": 2} | changes)


def really(given, config):
    """The moments of a real step on this CPU."""
    model = build(given, config).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(tensor, std=0.02)
    run = Run(given, model, optimizer_for)
    (run.step if given.step_in_backward else lambda _: run.start_states())("refresh")
    run.step("step")
    return list(run.live.moments())


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS)
def test_a_trace_counts_what_a_real_step_allocates(changes):
    given = setting(**changes)
    traced, real = (peaks(m) for m in (moments_of(given, TINY, False), really(given, TINY)))
    assert traced.keys() == real.keys()
    for phase, moment in real.items():
        assert traced[phase].total == pytest.approx(moment.total, rel=0.01), phase
        assert traced[phase].op == moment.op, phase


def test_leaving_out_spans_changes_no_peak(monkeypatch):
    given = setting(method="galore", sequence=8)
    monkeypatch.setattr(state, "SPAN", 2560)
    monkeypatch.setattr(rules, "SPAN", 2560)
    few = peaks(moments_of(given, TINY, True))
    monkeypatch.setattr(gpu, "_few", lambda parts: parts)
    every = peaks(moments_of(given, TINY, True))
    assert {p: m.kinds for p, m in few.items()} == {p: m.kinds for p, m in every.items()}


def at_five_blocks(**changes):
    """By phase: bytes by class as two shallower models foretell them, and as they are."""
    given = setting(**changes)
    small, large, deep = (moments_of(given, with_depth(TINY, d), True) for d in (2, 3, 5))
    foretold, seen = peaks_at(5, small, large, (2, 3)), peaks(deep)
    return [{phase: m.kinds for phase, m in found.items()} for found in (foretold, seen)]


@pytest.mark.parametrize(
    "changes", [{"method": "dora", "rank": 2}, {"method": "full", "step": "foreach"}], ids=str
)
def test_two_depths_tell_every_other_one_exactly(changes):
    foretold, seen = at_five_blocks(**changes)
    assert foretold == seen


def test_clipping_and_plain_and_projected_parameters_grow_each_in_its_place():
    """As one phase, what a step makes on its way was lost: it was taken to be 0."""
    foretold, seen = at_five_blocks(method="galore", state_dtype="int8")
    for phase in ("step: clipping", "step", "step: plain"):
        assert foretold[phase] == seen[phase]
    assert foretold["step"]["method temporaries"] > 4 * 4 * 96  # R, of the widest


def test_a_ledger_has_the_phases_of_a_step():
    ledger = trace(setting(method="lora"), TINY)
    assert set(ledger.phases) == {
        "load", "forward end", "loss backward", "block backward", "optimizer step",
    }  # fmt: skip
    assert ledger.phases["load"]["weights"] < ledger.allocated


def test_what_a_trace_cannot_show_is_refused():
    with pytest.raises(HirankError, match="sees one process"):
        trace(setting(method="full", world=2, sharding="fsdp2"), TINY)


def test_a_name_in_the_catalogue_is_enough():
    given = setting(model="smollm2-135m", method="lora", targets=("q_proj",))
    weights = 134_515_008 * 2
    assert trace_of(given).phases["load"]["weights"] == pytest.approx(weights, rel=0.001)


def test_an_attention_that_a_model_does_not_have_is_refused():
    with pytest.raises(HirankError, match="try eager"):
        trace_of(setting(model="gemma-2-2b", method="lora"))
