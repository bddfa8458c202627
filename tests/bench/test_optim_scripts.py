"""The scripts beside the pretraining benchmark: its text, and the rates it goes on with."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROSE = (
    "This is a paragraph of the kind that a manual has: it says what the program does, when it is "
    "of use, and what you will need for it before you can begin."
)


def test_paragraphs_come_without_markup_listings_and_menus():
    page = f"""<head><title>A</title></head><nav><p>{PROSE} And back.</p></nav>
    <h1>Use</h1><p>{PROSE.replace("program", "<code>program</code>")}</p>
    <pre>for x in y: print(x)</pre><ul><li>Short.</li><li>{PROSE[:-1]}, too.</li></ul>"""
    prose = script("prose")
    found = [part.strip() for part in prose.from_html(page)]
    assert [part for part in found if prose.is_prose(part)] == [PROSE, f"{PROSE[:-1]}, too."]


def test_pod_has_its_markup_taken_off():
    prose = script("prose")
    pod = f"=head1 NAME\n\n  some code\n\n{PROSE.replace('program', 'C<< B<program> >>')}\n"
    assert [part.strip() for part in prose.from_pod(pod)] == [PROSE]


@pytest.mark.parametrize(
    "other",
    [
        PROSE[:60],
        PROSE[:-1],
        "Dies ist ein Absatz einer anderen Sprache, der lang genug ist und wie ein Satz endet, "
        "aber doch nicht auf Englisch geschrieben wurde, also bleibt er weg.",
        "x[i] = y[i] + z[i]; // for all i, as in a(b(c(d(e(f))))) { return 0; } [1] [2] [3] [4] of "
        "the a to in and is it == != <= >= && || ++ -- += -= *= /= %= <<= >>= :: -> ...",
    ],
    ids=["short", "no end", "other language", "code"],
)
def test_what_is_no_prose_is_left_out(other: str):
    prose = script("prose")
    assert prose.is_prose(PROSE) and not prose.is_prose(other)


def test_nothing_is_there_twice():
    prose, seen = script("prose"), set()
    assert prose.is_new(PROSE, seen) and not prose.is_new(PROSE.upper() + " 2", seen)


def test_the_best_rate_of_short_runs_is_handed_on(tmp_path: Path):
    def row(arm: str, steps: int, loss: float, **rates: float) -> str:
        settings = {"steps": steps, "lr": 0.01, "adamw_lr": 0.0025} | rates
        return json.dumps({"arm": arm, "settings": settings, "metrics": {"eval_loss": loss}})

    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "pretrain.jsonl").write_text(
        "\n".join(
            [
                row("hirank-galore", 400, 5.0, lr=0.005),
                row("hirank-galore", 400, 4.0, lr=0.02),
                row("hirank-galore", 400, float("nan"), lr=0.04),
                row("hirank-galore", 2000, 3.0, lr=0.08),
                row("adamw", 400, 4.5, adamw_lr=0.001),
            ]
        )
    )
    best = script("best_lr").main
    assert best(str(tmp_path), "hirank-galore", "400") == "--lr 0.02"
    assert best(str(tmp_path), "adamw", "400") == "--adamw-lr 0.001"
    with pytest.raises(SystemExit, match="sweep first"):
        best(str(tmp_path), "hirank-fira", "400")
