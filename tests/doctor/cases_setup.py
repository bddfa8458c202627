"""Traps of rank, targets, files and batches, each walked into and mended."""

from pathlib import Path

from peft import PeftModel
from torch import nn
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel

from doctor.cases import case, edit, rewrite, rows, trained, wrap
from helpers import tiny_llama, tiny_tokenizer

# Rank and scale.


@case("rank 20 on 4 layers whose smaller side is 16 or more: model.layers.0.self_attn.k_proj 16x32")
def rank_above_layer(tmp: Path):
    layers = {"target_modules": ["k_proj", "v_proj"], "lora_alpha": 20}
    yield {"model": wrap(**layers, r=20)}
    yield {"model": wrap(**layers, r=8)}


@case("2 layers, such as model.layers.0.self_attn.k_proj 16x32: 576 numbers for 512")
def adapter_larger_than_layer(tmp: Path):
    yield {"model": wrap(target_modules=["k_proj"], r=12)}
    yield {"model": wrap(target_modules=["k_proj"], r=10)}


@case("alpha / sqrt(r) is 16 on 2 layers, with alpha 64 and r 16")
def scale_far_off(tmp: Path):
    layers = {"target_modules": ["up_proj"], "r": 16, "use_rslora": True}
    yield {"model": wrap(**layers, lora_alpha=64)}
    yield {"model": wrap(**layers, lora_alpha=8)}


@case("14 layers, such as model.layers.0.self_attn.q_proj: 1 in use, 2 by alpha 8 and r 4")
def scale_disagrees(tmp: Path):
    model = wrap()
    layers = [m for m in model.modules() if hasattr(m, "set_scale")]
    for layer in layers:
        layer.set_scale("default", 0.5)
    yield {"model": model}
    for layer in layers:
        layer.set_scale("default", 1)
    yield {"model": model}


# Choice of layers.


@case("no adapted layer's name ends in qproj")
def target_matches_nothing(tmp: Path):
    yield {"model": wrap(target_modules=["qproj", "v_proj"])}
    yield {"model": wrap(target_modules=["q_proj", "v_proj"])}


@case("rank_pattern 'attn.q_prj', alpha_pattern 'k'")
def pattern_matches_nothing(tmp: Path):
    dead = {"rank_pattern": {"attn.q_prj": 2}, "alpha_pattern": {"k": 4}}
    model = wrap()  # PEFT and hirank warn of these when a model is made
    for setting, value in dead.items():
        setattr(model.peft_config["default"], setting, value)
    yield {"model": model}
    yield {"model": wrap(rank_pattern={"self_attn.q_proj": 2}, alpha_pattern={"k_proj": 4})}


@case("1 modules: lm_head")
def saved_and_targeted(tmp: Path):
    yield {"model": wrap(target_modules=["q_proj", "lm_head"], modules_to_save=["lm_head"])}
    yield {"model": wrap(target_modules=["q_proj"], modules_to_save=["lm_head"])}


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.ModuleDict({"q_proj": nn.Linear(16, 16)})
        self.language_model = nn.ModuleDict({"q_proj": nn.Linear(16, 16)})


@case("1 of 2 adapted layers: vision_tower.q_proj")
def targets_reach_other_towers(tmp: Path):
    yield {"model": wrap(Seeing(), target_modules=["q_proj"], task_type=None)}
    regex = r"language_model\..*q_proj"
    yield {"model": wrap(Seeing(), target_modules=regex, task_type=None)}


class Hybrid(nn.Module):
    """Four blocks, of which two have attention."""

    def __init__(self) -> None:
        super().__init__()
        names = ("q_proj", "in_proj", "q_proj", "in_proj")
        self.layers = nn.ModuleList(nn.ModuleDict({n: nn.Linear(16, 16)}) for n in names)


@case("2 of 4 blocks of layers: layers.1, layers.3")
def targets_skip_blocks(tmp: Path):
    yield {"model": wrap(Hybrid(), target_modules=["q_proj"], task_type=None)}
    yield {"model": wrap(Hybrid(), target_modules=["q_proj", "in_proj"], task_type=None)}


@case("share a weight 320x32, adapted is lm_head")
def tied_embeddings(tmp: Path):
    tied = tiny_llama(tie_word_embeddings=True)
    yield {"model": wrap(tied, target_modules=["q_proj", "lm_head"])}
    untied = tiny_llama(tie_word_embeddings=False)
    yield {"model": wrap(untied, target_modules=["q_proj", "lm_head"])}


# Adapter folders.


@case("lora_alpha in")
def alpha_missing(tmp: Path):
    trained().save_pretrained(tmp)
    edit(tmp, lambda settings: settings.pop("lora_alpha"))
    yield {"adapter_dir": tmp}
    edit(tmp, lambda settings: settings.update(lora_alpha=8))
    yield {"adapter_dir": tmp}


@case("use_dora is False, and 14 of 42 weights are magnitudes")
def dora_flag_disagrees(tmp: Path):
    trained(use_dora=True).save_pretrained(tmp)
    edit(tmp, lambda settings: settings.update(use_dora=False))
    yield {"adapter_dir": tmp}
    edit(tmp, lambda settings: settings.update(use_dora=True))
    yield {"adapter_dir": tmp}


@case("14 of 28 weights")
def file_weights_empty(tmp: Path):
    model = trained()
    model.save_pretrained(tmp)
    rewrite(tmp, lambda key, weight: weight[:0] if "lora_A" in key else weight)
    yield {"adapter_dir": tmp}
    model.save_pretrained(tmp)
    yield {"adapter_dir": tmp}


@case("14 weights")
def file_weights_not_finite(tmp: Path):
    model = trained()
    model.save_pretrained(tmp)
    rewrite(tmp, lambda key, weight: weight / 0 if "lora_B" in key else weight)
    yield {"adapter_dir": tmp}
    model.save_pretrained(tmp)
    yield {"adapter_dir": tmp}


@case("14 of 14 lora_B weights are zero")
def file_weights_untrained(tmp: Path):
    wrap().save_pretrained(tmp)
    yield {"adapter_dir": tmp}
    trained().save_pretrained(tmp)
    yield {"adapter_dir": tmp}


@case("28 of 28 saved weights are not in the model")
def resumed_from_scratch(tmp: Path):
    trained().save_pretrained(tmp)
    yield {"model": wrap(), "adapter_dir": tmp}
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp, is_trainable=True)
    yield {"model": loaded, "adapter_dir": tmp}


@case("use_rslora is True, in the folder False")
def settings_differ_from_file(tmp: Path):
    trained().save_pretrained(tmp)
    edit(tmp, lambda settings: settings.update(use_rslora=True))
    model = PeftModel.from_pretrained(tiny_llama(), tmp, is_trainable=True)
    edit(tmp, lambda settings: settings.update(use_rslora=False))
    yield {"model": model, "adapter_dir": tmp}
    model = PeftModel.from_pretrained(tiny_llama(), tmp, is_trainable=True)
    yield {"model": model, "adapter_dir": tmp}


# Batches.


@case("6 of 16 tokens with loss in this batch are padding")
def padding_carries_loss(tmp: Path):
    batch = rows()
    batch["attention_mask"][0, 2:] = 0
    yield {"model": wrap(), "batch": batch}
    batch["labels"][batch["attention_mask"] == 0] = -100
    yield {"model": wrap(), "batch": batch}


@case("ends 2 texts in this batch, none with loss")
def end_never_learnt(tmp: Path):
    tokenizer = tiny_tokenizer()
    own = tokenizer.pad_token
    texts = [tokenizer(text + tokenizer.eos_token) for text in ("one two three", "four")]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    tokenizer.pad_token = tokenizer.eos_token
    yield {"model": wrap(), "batch": dict(collate(texts)), "tokenizer": tokenizer}
    tokenizer.pad_token = own
    yield {"model": wrap(), "batch": dict(collate(texts)), "tokenizer": tokenizer}


@case("max_length is 1024, the model has 64 positions")
def longer_than_positions(tmp: Path):
    base = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64)
    )
    model = wrap(base, fan_in_fan_out=True)
    yield {"model": model, "config": {"max_length": 1024}}
    yield {"model": model, "config": {"max_length": 64}}
