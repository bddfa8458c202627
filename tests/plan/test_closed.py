"""The closed form against what autograd saves and what a trace of the real code sees."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hirank.errors import HirankError
from hirank.plan.block import block_input, kept_parts
from hirank.plan.catalogue import CATALOGUE
from hirank.plan.closed import closed_form, timeline
from hirank.plan.inventory import read_shape
from hirank.plan.ledger import CLASSES, PHASES
from hirank.plan.setting import Setting
from plan.models import model_of, shape_of

TOKENS = {"batch": 2, "sequence": 32}


class Held:
    """What autograd is given to keep, so that one can see whether it still does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(run: Callable[[], Any], known: set[int]) -> int:
    """Bytes of storages that the graph keeps, without those that are `known`."""
    refs: list[weakref.ref[Held]] = []

    def pack(tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        refs.append(weakref.ref(held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        result = run()
    storages = {
        held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage().nbytes()
        for ref in refs
        if (held := ref()) is not None
    }
    del result
    return sum(size for pointer, size in storages.items() if pointer not in known)


def saved_by(setting: Setting, kind: str, layers: int) -> int:
    model = model_of(setting, kind, num_hidden_layers=layers)
    tensors = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    ids = torch.ones(setting.batch, setting.sequence, dtype=torch.long)

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
            return model(input_ids=ids, use_cache=False)

    return saved_bytes(run, known)


KEPT = [
    ("llama", {"method": "lora"}),
    ("llama", {"method": "dora"}),
    ("qwen2", {"method": "dora", "targets": ("q_proj", "up_proj")}),
    ("llama", {"method": "dora-peft"}),
    ("llama", {"method": "dora-peft", "autocast": False}),
    ("llama", {"method": "full", "base_dtype": "fp32"}),
    ("llama", {"method": "full", "autocast": False}),
    ("llama", {"method": "lora", "attention": "eager"}),
    ("qwen3", {"method": "full", "base_dtype": "fp32"}),
    ("gemma3_text", {"method": "dora"}),
    ("gemma2", {"method": "full", "attention": "eager"}),
]


@pytest.mark.parametrize(("kind", "values"), KEPT, ids=str)
def test_a_block_keeps_what_autograd_saves(kind: str, values: dict[str, Any]):
    setting = Setting("tiny", rank=8, **TOKENS, **values)
    seen = saved_by(setting, kind, 2) - saved_by(setting, kind, 1)
    told = sum(part.size for part in kept_parts(setting, shape_of(kind)))
    assert told == pytest.approx(seen, rel=2e-3)


# Against the trace.

CROSSED = [
    ("llama", {"method": "lora"}),
    ("qwen2", {"method": "dora", "checkpointing": True}),
    ("llama", {"method": "full", "base_dtype": "fp32", "loss": "plain"}),
    ("qwen3", {"method": "rslora", "attention": "eager", "checkpointing": True}),
    ("gemma3_text", {"method": "lora"}),
    ("qwen2", {"method": "galore", "rank": 16, "checkpointing": True}),
    ("llama", {"method": "lora", "packing": True}),
    ("llama", {"method": "qlora"}),
    ("gemma", {"method": "full", "autocast": False, "accumulation": 2}),
    ("qwen2", {"method": "qgalore", "rank": 16, "loss": "plain"}),
    ("qwen2", {"method": "galore", "rank": 16, "step_in_backward": True}),
]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(("kind", "values"), CROSSED, ids=str)
def test_both_engines_agree_within_3_percent(kind: str, values: dict[str, Any]):
    trace = pytest.importorskip("hirank.plan.trace").trace
    from plan.models import transformers_config

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 8192}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    setting = Setting("tiny", **{"rank": 8, "batch": 2, "sequence": 512, **values})
    closed = closed_form(setting, shape_of(kind, **sizes))
    traced = trace(setting, transformers_config(kind, **sizes))
    assert closed.allocated == pytest.approx(traced.allocated, rel=0.03)


# What has been measured or derived elsewhere.

GIB = 2**30


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "full", "step": "loop"}, 58.77),
        ({"method": "full", "step": "foreach"}, 70.93),
        ({"method": "dora-peft", "checkpointing": False}, 33.97),
    ],
)
def test_a_7b_as_traced_by_another_program(values: dict[str, Any], expected: float):
    """Traces by a tracker that was written before this planner."""
    shape = read_shape(CATALOGUE["qwen2.5-7b"].config, "q")
    usual: dict[str, Any] = {"autocast": False, "loss": "plain", "checkpointing": True}
    setting = Setting("q", rank=16, **(usual | values))
    assert closed_form(setting, shape).allocated / GIB == pytest.approx(expected, rel=0.025)


# Properties.

ANY: list[dict[str, Any]] = [
    {"method": "full", "base_dtype": "fp32"},
    {"method": "dora", "rank": 64},
    {"method": "qdora"},
    {"method": "galore", "rank": 128, "step_in_backward": True},
    {"method": "qgalore", "rank": 128, "accumulation": 4},
]


@pytest.mark.parametrize("values", ANY, ids=str)
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-30b-a3b", "gemma-3-4b"])
def test_more_tokens_never_need_less(values: dict[str, Any], name: str):
    shape = read_shape(CATALOGUE[name].config, name)
    sizes = [
        closed_form(Setting(name, sequence=length, **values), shape).allocated
        for length in (1, 128, 1024, 8192)
    ]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("values", ANY, ids=str)
def test_a_ledger_adds_up(values: dict[str, Any]):
    shape = read_shape(CATALOGUE["qwen2.5-0.5b"].config, "q")
    ledger = closed_form(Setting("q", eval_batch=4, **values), shape)
    assert set(ledger.phases) <= set(PHASES)
    assert all(set(kinds) <= set(CLASSES) for kinds in ledger.phases.values())
    assert ledger.allocated == max(ledger.total(phase) for phase in ledger.phases)
    assert ledger.allocated == sum(ledger.at_peak().values())
    at_peak = sum(term.size for term in ledger.terms if ledger.moment in term.phases)
    assert at_peak == ledger.allocated < ledger.reserved < ledger.process


def test_checkpointing_keeps_a_block_input_a_block():
    shape = read_shape(CATALOGUE["qwen2.5-7b"].config, "q")
    setting = Setting("q", checkpointing=True)
    assert block_input(setting, shape).size == 7 * 2**20
    moments = dict(timeline(setting, shape))
    assert moments["start"] == moments["end"]
    assert (
        max(sum(kinds.values()) for kinds in moments.values())
        == closed_form(setting, shape).allocated
    )


def test_accumulation_keeps_gradients_through_forward():
    shape = shape_of("llama")
    once, twice = (
        closed_form(Setting("tiny", method="full", accumulation=n), shape) for n in (1, 2)
    )
    assert "gradients" not in once.phases["forward end"]
    assert twice.phases["forward end"]["gradients"] == shape.parameters * 2


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama-3.2-1b", {"method": "dora-peft", "adapter_dtype": "bf16"}),
        ("gemma-2-2b", {"method": "lora", "attention": "eager", "loss": "plain"}),
    ],
)
def test_where_the_engines_are_known_to_part_a_plan_says_so(model: str, more: dict[str, Any]):
    shape = read_shape(CATALOGUE[model].config, model)
    notes = closed_form(Setting(model, **more), shape).notes
    assert any("--engine trace" in note for note in notes)


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_sharded_weights_are_split(sharding: Any):
    shape = read_shape(CATALOGUE["llama-3.1-8b"].config, "l")
    setting = Setting("l", method="full", world=8, sharding=sharding)
    ledger = closed_form(setting, shape)
    assert ledger.phases["load"]["weights"] == -(-shape.parameters * 2 // 8)
    bound = "allow 15 %" if sharding == "zero3" else "allow 5 %"
    assert any(bound in note for note in ledger.notes)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": "lara"}, "nearest known one is lora"),
        ({"base_dtype": "fp16"}, "nearest known one is bf16"),
        ({"rank": 0}, "at least 1"),
        ({"batch": True}, "whole number"),
        ({"labelled": 0.0}, "above 0"),
        ({"world": 4}, "use ddp"),
        ({"sharding": "ddp"}, "set world"),
        ({"step_in_backward": True}, "belongs to galore"),
        ({"method": "galore", "sharding": "zero2", "world": 2}, "flattens"),
        ({"kbit_upcast": True}, "belongs to qlora"),
        ({"method": "galore", "step_in_backward": True, "sharding": "ddp", "world": 2}, "one GPU"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], said: str):
    with pytest.raises(HirankError, match=said):
        Setting("tiny", **values)
