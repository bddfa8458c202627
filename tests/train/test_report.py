"""The report is whole, offline, safe against what a run contains, and sensible for any run."""

import base64
import hashlib
import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from hirank.errors import HirankError
from hirank.train.report import MAX_SAMPLES, MAX_TEXT, layer_groups, write_report
from run_folder import events, layers, write_run

Row = dict[str, Any]


class Page(HTMLParser):
    """A page taken apart: tags with their attributes, visible text, and scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.tags, self.scripts, self.words = html, [], [], []  # type: ignore
        self._inside = ""
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.words.append(data)


def report(folder: Path, rows: list[Row], **config: Any) -> Page:
    return Page(write_report(write_run(folder, rows, **config)).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(tmp_path_factory.mktemp("runs") / "orders-1", events(steps=40, every=10))


def test_headline_numbers_come_first(page: Page) -> None:
    cards = page.text.split("Training", 1)[0]
    for text in (
        "orders-1", "SmolLM2-135M-Instruct", "DoRA, r = 64, alpha = 128", "finished, 40 steps",
        "1,280 training and 100 held-out examples", "0 % → 85 %", "3.100 →", "1.72 GB",
        "tokens/s", "19.8 M of 154.3 M parameters", "12.8 %",
    ):  # fmt: skip
        assert text in cards


def test_the_rest_of_the_run_is_there(page: Page) -> None:
    for text in (
        "Gradient norm", "Turn the order into JSON.", "✓ exact", "✗ differs", "209", "PEFT's own",
        "the adapter has a bias", "model.layers.*.mlp.up_proj", "2.13.0+cpu", "scheduler: cosine",
        "hirank chat", "--resume", "PeftModel.from_pretrained",
    ):  # fmt: skip
        assert text in page.text


def test_nothing_is_asked_of_the_network(page: Page) -> None:
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "base", "form"}
    assert not {name for _, names in page.tags for name in names} & {"src", "href", "srcset"}
    css = page.html.split("<style>")[1].split("</style>")[0]
    assert "url(" not in css and "@import" not in css


def test_plotly_is_there_once_and_only_our_scripts_may_run(page: Page) -> None:
    figures, plotly, boot = page.scripts
    assert plotly == get_plotlyjs() and len(json.loads(figures)) == 6
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.html)
    assert policy and policy[1].startswith("default-src &#39;none&#39;")
    assert "unsafe-inline" not in policy[1].split("style-src")[0]
    for script in (plotly, boot):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"sha256-{digest}" in policy[1].replace("&#43;", "+").replace("&#x2B;", "+")


HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</td></table></style><iframe src=javascript:alert(1)>",
    "{{ 7 * 7 }}{% raw %}<!-- ]]>",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_run_stays_text(tmp_path: Path, text: str) -> None:
    def run(name: str, word: str) -> Page:
        rows = events(steps=9, every=3)
        start = rows[0]
        start["model"] = word
        for layer in start["layers"]:
            layer |= {"kind": word, "tier": word, "reason": word, "name": word}
        for row in rows:
            if row["event"] == "sample":
                row |= {"prompt": word, "expected": word, "output": word + " and more"}
        rows[-1]["status"] = word
        folder = write_run(tmp_path / name, rows, method={"name": word}, data={"train": [word]})
        (folder / "versions.json").write_text(json.dumps({word: word}))
        return Page(write_report(folder).read_text(encoding="utf-8"))

    harmless, hostile = run("a", "some harmless words of no meaning"), run("b", text)
    assert Counter(hostile.tags) == Counter(harmless.tags)
    assert len(hostile.scripts) == 3
    assert " ".join(text.split()) in hostile.text  # shown as it was written


def test_a_hostile_folder_name_stays_text(tmp_path: Path) -> None:
    hostile = report(tmp_path / "<img src=x onerror=alert(1)>", events(steps=4, every=2))
    assert "img" not in {tag for tag, _ in hostile.tags}
    assert "<img src=x onerror=alert(1)>" in hostile.text


# Runs that are not whole.


def test_a_run_without_a_step(tmp_path: Path) -> None:
    start = {"event": "start", "step": 0, "time": "2026-11-29T20:11:05+00:00"}
    page = report(tmp_path, [start])
    assert "No step was logged" in page.text and "No samples were generated" in page.text
    assert "unfinished after 0 steps" in page.text and "no end" in page.text
    assert page.scripts == [] and "Use it" not in page.text


def test_an_empty_log(tmp_path: Path) -> None:
    assert "No step was logged" in report(tmp_path, []).text


def test_a_run_without_evaluation_tells_its_training_loss(tmp_path: Path) -> None:
    rows = [row for row in events(steps=9) if row["event"] not in ("eval", "sample")]
    page = report(tmp_path, rows)
    assert "Training loss" in page.text and "Exact match" not in page.text
    assert "logged at step 9" in page.text


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    rows = events(steps=9)
    rows[-1]["status"] = "interrupted"
    page = report(tmp_path / "it's", rows)
    assert "interrupted after 9 steps" in page.text and "To go on: hirank train" in page.text


def test_nan_losses_are_told(tmp_path: Path) -> None:
    rows = events(steps=9)
    for row in rows:
        if row["event"] == "step" and row["step"] >= 5:
            row["loss"] = row["grad_norm"] = math.nan
    page = report(tmp_path, rows)
    assert "not a finite number at step 5" in page.text
    assert json.loads(page.scripts[0])[0]["data"][0]["y"][4:] == [None] * 5


@pytest.mark.parametrize(
    ("method", "text"),
    [({"name": "full"}, "All weights were trained"), ({"accelerate": False}, "PEFT's own code")],
)
def test_no_layers_are_explained(tmp_path: Path, method: Row, text: str) -> None:
    rows = events(steps=4)
    del rows[0]["layers"]
    assert text in report(tmp_path, rows, method=method).text


def test_an_empty_answer_and_a_missing_one(tmp_path: Path) -> None:
    sample = {"event": "sample", "step": 0, "phase": "before", "prompt": "p", "expected": "e"}
    page = report(tmp_path, [sample | {"output": ""}])
    assert "(empty)" in page.text and "not generated" in page.text


def test_a_near_miss_is_marked_where_it_differs(tmp_path: Path) -> None:
    sample = {"event": "sample", "step": 0, "phase": "after", "prompt": "p"}
    texts = {"expected": '{"n": 2, "city": "Riga"}', "output": '{"n": 3, "city": "Riga"}'}
    page = report(tmp_path, [sample | texts])
    assert "{&#34;n&#34;: <mark>3</mark>, &#34;city&#34;" in page.html


def test_long_texts_and_many_samples_are_cut_and_said_to_be(tmp_path: Path) -> None:
    sample = {"event": "sample", "step": 0, "phase": "before", "expected": "e"}
    rows = [sample | {"prompt": f"p{n}", "output": "x" * (MAX_TEXT + 7)} for n in range(25)]
    page = report(tmp_path, rows)
    assert "(7 more characters)" in page.text
    assert f"{25 - MAX_SAMPLES} more in log.jsonl" in page.text and "p24" not in page.text


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    page = report(tmp_path, events(steps=6001, every=1000))
    assert "one logged step in 3" in page.text
    assert len(json.loads(page.scripts[0])[0]["data"][0]["x"]) == 2001


# Parts.


def test_layers_are_grouped_by_how_they_ran() -> None:
    most, rest = layer_groups(layers(count=30))
    assert (most.count, most.kind, most.tier) == (209, "DoRA", "eager")
    assert dict(most.names)["model.layers.*.mlp.down_proj"] == 29
    assert (rest.count, rest.tier, rest.reason) == (1, "peft", "the adapter has a bias")
    assert rest.names == [("model.layers.29.mlp.down_proj", 1)]
    assert layer_groups([]) == [] and layer_groups([{"name": "a"}])[0].count == 1


def test_the_report_replaces_itself_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path, events(steps=4))
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    names = {path.name for path in folder.iterdir()}
    assert names == {"log.jsonl", "config.yaml", "versions.json", "report.html"}


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(HirankError, match=r"log\.jsonl cannot be read"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
