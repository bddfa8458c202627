"""The report of a run, an HTML page (see `hirank.page.html`).

log.jsonl, config.yaml, versions.json  ->  Summary  ->  page (below)  ->  templates/report.html
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hirank.files import write_text
from hirank.page.charts import stride
from hirank.page.html import Card, Status, render
from hirank.page.units import bytes_text, count_text, duration_text, percent_text
from hirank.train.card import (
    METHOD_NAMES,
    best_text,
    chat_command,
    is_adapter,
    load_code,
    method_text,
    result_dir,
    resume_command,
    trainable_text,
)
from hirank.train.charts import run_charts
from hirank.train.summary import Change, Sample, Summary, load_summary

__all__ = ["write_report"]

MAX_SAMPLES = 20
MAX_TEXT = 4000
"""Characters of a prompt or answer that are shown."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from the run's log, settings and versions; whole or not at all.

    Works for a run in any state. Raises HirankError when there is no readable log or the folder
    cannot be written.
    """
    return write_text(run_dir / "report.html", report_html(load_summary(run_dir)))


def report_html(run: Summary) -> str:
    """The page as text."""
    charts = run_charts(run)
    return render("hirank.train", "report.html", page(run), charts)


def page(run: Summary) -> dict[str, Any]:
    """Everything the template shows, as plain values; nothing here is HTML."""
    samples = run.samples
    return {
        "title": run.run_dir.resolve().name,
        "subtitle": _subtitle(run),
        "status": _status(run),
        "notices": _notices(run),
        "cards": _cards(run),
        "stride": stride(len(run.steps)),
        "samples": [_sample_row(sample) for sample in samples[:MAX_SAMPLES]],
        "samples_note": _samples_note(run),
        "samples_left": max(0, len(samples) - MAX_SAMPLES),
        "layers": layer_groups(run.start.get("layers") or []),
        "no_layers": _no_layers(run),
        "usage": _usage(run),
        "config": run.config_text,
        "versions": run.versions,
    }


# The head of the page.


def _subtitle(run: Summary) -> str:
    parts = [Path(run.model_name).name if "\\" not in run.model_name else run.model_name]
    parts.append(method_text(run))
    sizes = [(run.start.get("n_train"), "training"), (run.start.get("n_eval"), "held-out")]
    told = [f"{size:,} {what}" for size, what in sizes if isinstance(size, int)]
    if told:
        parts.append(f"{' and '.join(told)} examples")
    if run.began:
        parts.append(f"{_date(run.began)}")
    return " · ".join(parts)


def _date(moment: datetime) -> str:
    there = moment.astimezone(UTC)
    return f"{there.day} {there:%B %Y, %H:%M} UTC"


def _status(run: Summary) -> Status:
    kind = "unfinished" if run.end is None else str(run.end.get("status") or "finished")
    step = f"{run.last_step:,} steps"
    if kind == "finished":
        return Status("finished", f"finished, {step}")
    return Status("failed" if kind == "failed" else "stopped", f"{kind} after {step}")


def _notices(run: Summary) -> list[str]:
    notices = []
    if run.nonfinite_step is not None:
        notices.append(
            f"The training loss was not a finite number at step {run.nonfinite_step}. Weights "
            "from after that step are not to be trusted: try a lower optim.lr."
        )
    if run.skipped:
        notices.append(
            f"{run.skipped:,} steps of single parameters were skipped because their gradients were "
            "not finite; those weights and their optimizer states stayed as they were."
        )
    if run.end is None:
        notices.append("The log has no end: the run is still going on, or it was killed.")
    elif run.end.get("status") == "interrupted":
        notices.append(f"The run was interrupted. To go on: {resume_command(run)}")
    return notices


def _cards(run: Summary) -> list[Card]:
    cards = [
        _change_card("Exact match", run.exact_match, percent_text, "held-out answers, step {:,}"),
        _change_card("Held-out loss", run.eval_loss, "{:.3f}".format, "best at step {:,}"),
        None if run.eval_loss else _train_card(run),
        _card("Time", run.seconds, duration_text, f"{run.last_step:,} optimizer steps"),
        _card("Speed", run.tokens_per_s, lambda n: f"{n:,.0f} tokens/s", _tokens_note(run)),
        _card("Peak memory", run.peak_memory, bytes_text, _memory_note(run)),
        _trainable_card(run),
    ]
    return [card for card in cards if card is not None]


def _memory_note(run: Summary) -> str:
    """What was planned stands beside it where the run was on a GPU, which the plan knows."""
    planned = run.start.get("planned")
    if not isinstance(planned, dict) or not planned.get("capacity"):
        return "of the training process"
    return f"planned {bytes_text(planned['allocated'])}"


def _card(label: str, value: float | None, form: Any, note: str) -> Card | None:
    return Card(label, form(value), note) if value else None


def _change_card(label: str, change: Change | None, form: Any, note: str) -> Card | None:
    if change is None:
        return None
    before = "" if change.before is None else form(change.before)
    return Card(label, form(change.after), note.format(change.step), before)


def _train_card(run: Summary) -> Card | None:
    return _change_card("Training loss", run.train_loss, "{:.3f}".format, "logged at step {:,}")


def _tokens_note(run: Summary) -> str:
    return f"median; {count_text(run.tokens)} tokens in all" if run.tokens else "median"


def _trainable_card(run: Summary) -> Card | None:
    text = trainable_text(run)
    if text is None:
        return None
    counts, share = text.removesuffix(")").split(" (")
    return Card("Trained", share, f"{counts} parameters")


# Samples.


@dataclass(frozen=True)
class Piece:
    """A stretch of an answer that is, or is not, as expected."""

    text: str
    differs: bool


def _samples_note(run: Summary) -> str:
    origin = "Held-out prompts" if run.start.get("n_eval") else "Prompts from the training data"
    return f"{origin} as the model sees them, answered before and after training."


def _sample_row(sample: Sample) -> dict[str, Any]:
    answers = (("Before", sample.before), ("After", sample.after))
    return {
        "prompt": _shortened(sample.prompt),
        "expected": _shortened(sample.expected),
        "answers": [_answer(label, text, sample.expected) for label, text in answers],
    }


def _answer(label: str, text: str | None, expected: str) -> dict[str, Any]:
    if text is None:
        return {"label": label, "missing": True}
    right = text.strip() == expected.strip()
    shown = _shortened(text)
    pieces = [Piece(shown, False)] if right else list(_compared(shown, _shortened(expected)))
    return {"label": label, "missing": False, "right": right, "pieces": pieces}


def _compared(text: str, expected: str) -> Iterable[Piece]:
    """The text cut where it leaves or rejoins the expected one, word by word.

    A text that has little in common with the expected one is not marked: all of it differs.
    """
    words, wanted = (re.findall(r"\w+|\s+|[^\w\s]", part) for part in (text, expected))
    matcher = difflib.SequenceMatcher(None, words, wanted, autojunk=False)
    if matcher.ratio() < 0.5:
        return [Piece(text, False)] if text else []
    codes = matcher.get_opcodes()
    pieces = [Piece("".join(words[a:b]), tag != "equal") for tag, a, b, _, _ in codes]
    return [piece for piece in pieces if piece.text]


def _shortened(text: str) -> str:
    more = len(text) - MAX_TEXT
    return text if more <= 0 else f"{text[:MAX_TEXT]} … ({more:,} more characters)"


# Layers.


@dataclass(frozen=True)
class LayerGroup:
    """Layers that ran alike: how many, which, and the pattern of their names with counts."""

    count: int
    kind: str
    tier: str
    reason: str
    names: list[tuple[str, int]]


def layer_groups(layers: Iterable[dict[str, Any]]) -> list[LayerGroup]:
    """Layers grouped by kind, tier and reason, the largest group first."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for layer in layers:
        kind, tier, reason = (str(layer.get(key) or "") for key in ("kind", "tier", "reason"))
        groups.setdefault((kind, tier, reason), []).append(str(layer.get("name", "")))
    made = [
        LayerGroup(len(names), METHOD_NAMES.get(kind, kind), tier, reason, _patterns(names))
        for (kind, tier, reason), names in groups.items()
    ]
    return sorted(made, key=lambda group: -group.count)


def _patterns(names: Iterable[str]) -> list[tuple[str, int]]:
    """`layers.0.mlp.up_proj`, `layers.1.mlp.up_proj` -> `layers.*.mlp.up_proj`, twice.

    A name that shares its pattern with no other is given in full.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [(found[0] if len(found) == 1 else p, len(found)) for p, found in alike.items()]


def _no_layers(run: Summary) -> str:
    if not is_adapter(run):
        by = f" {run.optimizer}." if run.optimizer else ""
        return f"All weights were trained; there are no adapter layers.{by}"
    if run.value("method", "accelerate") is False:
        return "Every adapted layer ran PEFT's own code, as method.accelerate: false asks."
    return "The log does not list the adapted layers."


# What to do next.


@dataclass(frozen=True)
class UsageStep:
    """A titled piece of code to copy."""

    title: str
    code: str


def _usage(run: Summary) -> list[UsageStep]:
    """Nothing before the first step: there is no checkpoint yet."""
    if not run.steps:
        return []
    folder = result_dir(run)
    load = load_code(run, str(run.run_dir / folder))
    best = best_text(run) if folder.endswith("-best") else None
    what = f"best weights, {best}" if best else "last weights"
    return [
        UsageStep("Try it in a terminal", chat_command(run)),
        UsageStep(f"Load it in Python, without hirank ({what})", load),
        UsageStep("Go on from the last checkpoint", resume_command(run)),
    ]
