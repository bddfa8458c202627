"""The model card: front matter that YAML reads, code that runs, text that stays text."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hirank.train.card import write_card
from run_folder import events, write_run

Row = dict[str, Any]


def card(folder: Path, rows: list[Row] | None = None, **config: Any) -> tuple[Row, str]:
    """(front matter, Markdown)."""
    folder = write_run(folder, events(steps=20, every=5) if rows is None else rows, **config)
    text = write_card(folder).read_text(encoding="utf-8")
    front, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert text.startswith("---\n")
    return yaml.safe_load(front), body


def code_of(body: str) -> str:
    found = re.search(r"```python\n(.*?)\n```", body, flags=re.DOTALL)
    assert found
    return found[1]


def test_front_matter_of_an_adapter(tmp_path: Path) -> None:
    front, _ = card(tmp_path)
    assert front == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["hirank", "dora", "lora"],
    }


def test_body(tmp_path: Path) -> None:
    _, body = card(tmp_path / "orders-1")
    for text in (
        "# orders-1", "DoRA, r = 64, alpha = 128", "train.jsonl", "1,280 training examples",
        "| lr | 0.0002 |", "| batch_size | 8 |", "exact match on held-out data | 0 % → 85 %",
        "| peak memory | 1.72 GB |", "| best weights | from step 20 |",
        "19.8 M of 154.3 M (12.8 %)", "| torch | 2.13.0+cpu |",
    ):  # fmt: skip
        assert text in body
    assert "/data/orders" not in body  # folders of the machine are nobody's business


def test_a_local_base_is_not_given_as_a_hub_name(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = events(steps=4)
    rows[0]["model"] = str(tiny_model_dir)
    front, body = card(tmp_path, rows)
    assert "base_model" not in front and front["library_name"] == "peft"
    assert "add its Hub name as `base_model`" in body


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_python_in_the_card_loads_the_adapter(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = get_peft_model(base, LoraConfig(r=4, use_dora=True, target_modules="all-linear"))
    torch.nn.init.normal_(
        model.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].weight
    )
    model.save_pretrained(tmp_path / "adapter-best")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "adapter-best")
    rows = events(steps=4)
    rows[0]["model"] = str(tiny_model_dir)
    _, body = card(tmp_path, rows)
    monkeypatch.chdir(tmp_path)
    found: Row = {}
    exec(compile(code_of(body), "card", "exec"), found)
    ids = torch.tensor([[5, 6, 7]])
    assert isinstance(found["model"], PeftModel)
    assert torch.equal(found["model"](ids).logits, model.eval()(ids).logits)


def test_full_fine_tuning_is_a_model_of_its_own(tmp_path: Path) -> None:
    front, body = card(tmp_path, method={"name": "full"})
    assert front["library_name"] == "transformers" and front["tags"] == ["hirank", "full"]
    assert front["base_model_relation"] == "finetune"
    assert "from_pretrained('model')" in code_of(body) and "peft" not in code_of(body)


def test_a_gguf_base_is_loaded_as_one(tmp_path: Path) -> None:
    rows = events(steps=4)
    rows[0]["model"] = "/models/tiny.gguf"
    front, body = card(tmp_path, rows)
    assert "from_pretrained('/models', gguf_file='tiny.gguf')" in code_of(body)
    assert "base_model" not in front


@pytest.mark.parametrize("rows", [[], [{"event": "start", "step": 0}]])
def test_a_run_that_tells_nothing(tmp_path: Path, rows: list[Row]) -> None:
    front, body = card(tmp_path, rows)
    assert front["library_name"] == "peft" and "## Results" not in body


@pytest.mark.parametrize(
    "name", ["a: b\n---\nlicense: mit", "`x` | <b>| *y*", "x'); import os #", "```\n# heading"]
)
def test_no_text_breaks_out(tmp_path: Path, name: str) -> None:
    rows = events(steps=4)
    rows[0]["model"] = name
    front, body = card(tmp_path, rows, method={"name": name}, data={"train": [name]})
    assert "license" not in front and front["tags"] == ["hirank", name, "lora"]
    calls = [
        node for node in ast.walk(ast.parse(code_of_longest(body))) if isinstance(node, ast.Call)
    ]
    assert len(calls) == 3
    assert "<b>" not in re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", body, flags=re.DOTALL)
    assert not re.search(r"^# heading", re.sub(r"(?s)(````+|```)python.*?\n\1\n", "", body), re.M)


def code_of_longest(body: str) -> str:
    found = re.search(r"(?s)^(`{3,})python\n(.*?)\n\1$", body, flags=re.M)
    assert found
    return found[2]
