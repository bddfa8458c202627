"""Nothing is said about setups that are fine."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainingArguments,
)
from trl import SFTConfig

import hirank
from doctor.cases import adamw, checkpointed, named, rows, trained, wrap
from helpers import tiny_llama, tiny_tokenizer
from hirank import diagnose

KINDS = {"lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ours", [False, True], ids=["peft", "hirank"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_all_linear_layers(kind: str, ours: bool, dtype: torch.dtype):
    model = wrap(tiny_llama(dtype=dtype), **KINDS[kind])
    model = hirank.accelerate(model) if ours else model
    report = diagnose(model, optimizer=adamw(model), batch=rows(), world_size=2)
    assert not report, str(report)
    assert report.looked_at == ("model", "14 adapted layers", "optimizer", "batch")


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_training(kind: str):
    model = hirank.accelerate(wrap(**KINDS[kind])).train()
    optimizer = adamw(model, lr=1e-2)
    for _ in range(3):
        model(**rows()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not diagnose(model, optimizer=optimizer)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_as_transformers_switches_it_on(reentrant: bool):
    model = checkpointed(wrap(), reentrant=reentrant)
    assert not diagnose(model.train(), optimizer=adamw(model), batch=rows())


def test_checkpointing_without_input_gradients_is_fine_if_it_is_not_reentrant():
    model = checkpointed(wrap(), reentrant=False)
    model.disable_input_require_grads()
    assert not diagnose(model)


def test_reentrant_checkpointing_is_fine_with_an_adapted_embedding():
    model = checkpointed(wrap(target_modules=["embed_tokens", "q_proj"]), reentrant=True)
    model.disable_input_require_grads()
    with torch.no_grad():
        named(model, "lora_embedding_B")[0].add_(0.1)
    assert not diagnose(model)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("arguments", [TrainingArguments, SFTConfig])
def test_with_a_trainers_arguments(arguments, tmp_path):
    config = arguments(
        output_dir=str(tmp_path),
        bf16=False,
        use_cpu=True,
        report_to="none",
        **({"max_length": 512} if arguments is SFTConfig else {}),
    )
    assert not diagnose(wrap(lora_dropout=0.1).eval(), config=config)


def test_a_model_that_continues_from_its_folder(tmp_path):
    for kind in KINDS.values():
        trained(**kind).save_pretrained(tmp_path)
        model = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)
        assert not diagnose(model, adapter_dir=tmp_path, optimizer=adamw(model))
        half = PeftModel.from_pretrained(
            tiny_llama(dtype=torch.bfloat16), tmp_path, is_trainable=True
        )
        assert not diagnose(hirank.accelerate(half), adapter_dir=tmp_path)


def test_a_folder_with_patterns_and_whole_modules(tmp_path):
    settings = {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 4},
        "modules_to_save": ["lm_head"],
    }
    trained(**settings).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)
    assert not diagnose(model, adapter_dir=tmp_path, optimizer=adamw(model))
    assert not diagnose(adapter_dir=tmp_path)


def test_several_adapters_of_which_one_is_trained():
    model = wrap()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    assert not diagnose(model, optimizer=adamw(model), world_size=2, batch=rows())


def test_gpt2_and_its_transposed_layers():
    base = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64))
    for kind in KINDS.values():
        model = wrap(copy.deepcopy(base), fan_in_fan_out=True, **kind)
        batch = {"input_ids": torch.randint(0, 64, (1, 8))}
        assert not diagnose(model, optimizer=adamw(model), batch=batch)


def test_experts_that_peft_names_in_patterns_of_its_own():
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = wrap(
        Qwen3MoeForCausalLM(config),
        target_modules=["q_proj"],
        target_parameters=experts,
    )
    model.peft_config["default"].rank_pattern = {
        r".*\.gate_up_proj": 4
    }  # as PEFT does for fused ones
    batch = {"input_ids": torch.randint(0, 64, (1, 8))}
    assert not diagnose(model, optimizer=adamw(model), batch=batch)


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_a_classifier_and_its_head(task):
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    base = BertForSequenceClassification(BertConfig(**small, vocab_size=64))
    model = wrap(base, target_modules=["query", "value"], task_type=task)
    assert not diagnose(model, optimizer=adamw(model))


def test_convolutions():
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

    for kind in KINDS.values():
        model = wrap(Convolved(), target_modules=["conv"], task_type=None, **kind)
        assert not diagnose(model, optimizer=adamw(model), batch={"x": torch.randn(1, 8, 5, 5)})


def test_a_model_that_is_trained_whole_and_another_kind_of_adapter():
    whole = tiny_llama().train()
    assert not diagnose(whole, optimizer=torch.optim.AdamW(whole.parameters(), lr=1e-5))
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    assert not diagnose(get_peft_model(tiny_llama(), config))


def test_trained_biases_are_meant_if_the_settings_say_so():
    base = tiny_llama(attention_bias=True)
    assert not diagnose(wrap(base, bias="all"))


@pytest.mark.parametrize("own_padding", [True, False])
def test_answers_alone_are_learnt(own_padding: bool):
    tokenizer = tiny_tokenizer()
    if not own_padding:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [tokenizer(text + tokenizer.eos_token) for text in ("one two three", "four")]
    learnt = [{**text, "labels": [-100] * 2 + list(text["input_ids"])[2:]} for text in texts]
    batch = DataCollatorForSeq2Seq(tokenizer)(learnt)
    assert not diagnose(wrap(), batch=dict(batch), tokenizer=tokenizer)


def test_looking_changes_nothing():
    model = hirank.accelerate(wrap(use_dora=True, lora_dropout=0.1)).train()
    before = copy.deepcopy(model.state_dict())
    batch, optimizer = rows(), adamw(model)
    random = torch.get_rng_state()
    diagnose(model, optimizer=optimizer, batch=batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())
