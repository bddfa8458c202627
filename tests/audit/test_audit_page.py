"""The page of an audit is whole, offline and safe; commands say what they found, or one line."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner, Result

from audit.on_disk import saved
from helpers import save_tiny_model, tiny_llama
from hirank.adapters.base_files import BaseFolder
from hirank.adapters.files import AdapterFolder
from hirank.adapters.merge_files import write_merged
from hirank.adapters.merge_plan import Rounding, plan_merge
from hirank.audit.merge import FidelityMeter
from hirank.audit.page import page_html
from hirank.audit.rank import LayerRank
from hirank.audit.spectrum import Spectrum
from hirank.audit.summary import Audit, audit_adapter
from hirank.cli import app


class Page(HTMLParser):
    """Tags with their attributes, visible words, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside != "style":
            (self.scripts if self._inside == "script" else self.words).append(data)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and `dora` and `lora` on it, in one folder."""
    root = tmp_path_factory.mktemp("audit")
    save_tiny_model(root / "base")
    torch.manual_seed(0)
    for name, dora in (("dora", True), ("lora", False)):
        config = LoraConfig(
            r=8, lora_alpha=16, use_dora=dora, target_modules=["q_proj", "up_proj", "lm_head"]
        )
        model = get_peft_model(tiny_llama(), config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.02)
                if "magnitude" in key:
                    parameter.mul_(1 + 0.002 * torch.randn_like(parameter))
        model.save_pretrained(root / name, save_embedding_layers=False)
    return root


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, words)], env={"COLUMNS": "160"})


def test_the_page_has_verdicts_first_then_numbers_and_plots(llama: Path):
    found = audit_adapter(llama / "dora", llama / "base")
    page = Page(page_html(found))
    order = [page.text.index(words) for words in ("Verdicts", "Parameters", "By kind of layer")]
    assert order == sorted(order)
    for words in (
        "DoRA, r = 8", "5 layers", "Rank fits", "q_proj", "Gains, 1 to 99 %", "Step",
        "model.layers.1.mlp.up_proj", "lora_alpha", "Effective rank", "all well",
    ):  # fmt: skip
        assert words in page.text
    figures = json.loads(page.scripts[0])
    kinds = Counter(trace["type"] for figure in figures for trace in figure["data"])
    assert kinds["heatmap"] == 6 and kinds["bar"] == 1 and kinds["scatter"] == 5


def test_without_a_base_the_page_says_what_the_files_say(llama: Path):
    page = Page(page_html(audit_adapter(llama / "dora")))
    assert "Give --base for the gains." in page.text and "1 in bf16" not in page.text
    assert "Give --base" not in Page(page_html(audit_adapter(llama / "lora"))).text


def test_merge_distortions_get_a_map_and_a_verdict(llama: Path):
    """They are those that the merge itself measures."""
    base, adapter = BaseFolder(llama / "base"), AdapterFolder(llama / "dora")
    meter = FidelityMeter()
    write_merged(plan_merge(base, adapter, Rounding(torch.bfloat16)), None, meter)
    audit = audit_adapter(llama / "dora", llama / "base")
    page = Page(page_html(audit))
    assert "Merge distortion" in page.text and "merge to bfloat16" in page.text
    for layer in meter.result().layers:
        assert audit.distortions[layer.name] == pytest.approx(layer.distortion, rel=1e-4)
    told = audit.as_dict()["layers"][0]
    assert told["merge_distortion"] == audit.distortions[told["name"]]
    assert audit_adapter(llama / "dora").merge is None


def test_nothing_is_asked_of_the_network(llama: Path):
    page = Page(page_html(audit_adapter(llama / "lora")))
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "base", "form"}
    assert not {name for _, names in page.tags for name in names} & {"src", "href", "srcset"}


HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</td></table></style><iframe src=javascript:alert(1)>",
    "{{ 7 * 7 }}{% raw %}<!-- ]]>",
)


def named(*words: str) -> Audit:
    layers = [
        LayerRank(name, "linear", (9, 9), 2, 1.0, 2.0, Spectrum((2.0, 0.1)), "float32", (1.0, 1.0))
        for word in words
        for name in (f"model.layers.0.{word}", f"model.layers.1.{word}", word)
    ]
    settings = {"base_model_name_or_path": f"x/{words[0]}"}
    return Audit(Path(words[-1]), settings, layers, obstacle=words[0])


def test_names_of_layers_stay_text():
    harmless = Page(page_html(named(*(f"some words {i}" for i in range(len(HOSTILE))))))
    hostile = Page(page_html(named(*HOSTILE)))
    assert Counter(hostile.tags) == Counter(harmless.tags)
    assert len(hostile.scripts) == len(harmless.scripts) == 3


def test_an_adapter_that_learnt_nothing():
    zero = replace(named("q").ranks[0], spectrum=Spectrum((0.0, 0.0)))
    audit = Audit(Path("x"), {}, [zero])
    assert [v.what for v in audit.verdicts()] == ["The adapter adds nothing"]
    assert "The adapter adds nothing" in Page(page_html(audit)).text


def test_the_full_increment_is_that_of_the_weights(llama: Path):
    found = audit_adapter(llama / "dora", llama / "base")
    for layer in AdapterFolder(llama / "dora"):
        W = tiny_llama().get_submodule(layer.name).weight.detach().double()
        V = W + layer.scale * layer.B.double() @ layer.A.double()
        D = layer.magnitude.double()[:, None] * V / V.norm(dim=1, keepdim=True) - W
        truth = torch.linalg.svdvals(D)
        values = found.increments[layer.name].known.values
        assert values == pytest.approx(truth.tolist()[: len(values)], abs=1e-5)
        assert found.gains[layer.name].step_norm == pytest.approx(float(D.norm()), rel=1e-5)


# The commands.


def test_the_bare_audit(llama: Path, tmp_path: Path):
    done = call(llama / "dora", "--base", llama / "base", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "✓ Rank fits." in done.stdout and "gains 1-99 %" in done.stdout
    assert (tmp_path / "audit.html").stat().st_size > 1e6
    same = call("adapter", llama / "dora", "--json")
    assert same.exit_code == 0 and json.loads(same.stdout)["dora"] is True


def test_gains_with_and_without_a_base(llama: Path):
    done = call("gains", llama / "dora", "--base", llama / "base")
    assert done.exit_code == 0 and "1 in bf16" in done.stdout and "q_proj" in done.stdout
    assert "need the base model" in call("gains", llama / "dora").stdout
    told = json.loads(call("gains", llama / "dora", "--base", llama / "base", "--json").stdout)
    assert 0 < told["lm_head"]["rounds_to_one"]["bf16"] < 1


def test_truncate(llama: Path, tmp_path: Path):
    done = call("truncate", llama / "dora", "--rank", "4", "--out", tmp_path / "small")
    assert done.exit_code == 0 and "8 -> 4" in done.stdout, done.output
    assert {layer.rank for layer in AdapterFolder(tmp_path / "small")} == {4}


def test_finetune(llama: Path):
    done = call("finetune", llama / "base", llama / "base", "--rank", "4")
    assert done.exit_code == 0 and "No matrix differs" in done.stdout


@pytest.mark.parametrize("command", [[], ["gains"], ["truncate", "--rank", "4", "--out", "OUT"]])
def test_bad_input_is_one_sentence(tmp_path: Path, command: list[str], llama: Path):
    words = [tmp_path / "new" if word == "OUT" else word for word in command]
    base = saved(tmp_path / "other").base
    wrong: list[list[Any]] = [
        [tmp_path / "none"],
        [llama / "dora", "--base", tmp_path / "none"],
        [llama / "dora", "--base", base],
    ]
    broken = tmp_path / "broken"
    shutil.copytree(llama / "dora", broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    for arguments in [*wrong, [broken]]:
        done = call(*words, *arguments)
        assert done.exit_code == 2 and not done.stdout, (arguments, done.output)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "new").exists()
