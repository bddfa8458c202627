"""An audit in the terminal: verdicts first, then a line for each kind of layer."""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hirank.audit.finetune import Change, Finetune
from hirank.audit.gains import LayerGains
from hirank.audit.rank import Suggestion
from hirank.audit.summary import Audit, Group, kind_of
from hirank.audit.truncate import Cut, Truncation
from hirank.audit.verdicts import Verdict
from hirank.page.units import count_text, percent_text

__all__ = ["about", "adapter_lines", "finetune_lines", "gain_lines", "suggested"]
__all__ += ["truncation_lines"]

_MARKS = {"bad": ("✗", "bold red"), "look": ("!", "bold yellow"), "good": ("✓", "bold green")}


def adapter_lines(audit: Audit) -> Iterator[RenderableType]:
    """What `hirank audit ADAPTER` prints."""
    yield from map(_verdict, audit.verdicts())
    yield ""
    yield _table(_COLUMNS + (_GAIN_COLUMNS if audit.gains else ()), map(_group, audit.groups()))
    yield Text(about(audit))
    yield from _suggestion(audit)


def about(audit: Audit) -> str:
    """What the columns are of, in a sentence or two."""
    said = "Ranks and |sBA| are medians of the spectrum of s B A"
    said += ", which for DoRA is the direction's part." if audit.dora else "."
    if audit.step is not None:
        return f"{said} All that the adapter changes is {percent_text(audit.step)} of the weights."
    return said + (" Give --base for the gains." if audit.dora else "")


def suggested(suggestion: Suggestion) -> str:
    """Settings as they are written in a configuration."""
    told = {"r": suggestion.r, "lora_alpha": suggestion.lora_alpha}
    patterns = {
        "rank_pattern": suggestion.rank_pattern,
        "alpha_pattern": suggestion.alpha_pattern,
    }
    return json.dumps(told | {key: value for key, value in patterns.items() if value}, indent=2)


def _suggestion(audit: Audit) -> Iterator[RenderableType]:
    found = audit.suggestion()
    if {layer.rank for layer in audit.ranks} == {found.r} and not found.rank_pattern:
        return
    now, then = map(count_text, found.parameters)
    yield ""
    patterns = len(found.rank_pattern)
    yield Text(
        f"To train it again: r {found.r} with a rank_pattern for {patterns} groups of layers, "
        f"{then} parameters instead of {now} (in --json and on the page)."
    )


def _verdict(verdict: Verdict) -> Text:
    mark, style = _MARKS[verdict.level]
    return Text.assemble((f"{mark} {verdict.what}. ", style), verdict.why)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(Text(name), justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


_COLUMNS = ("layers", "count", "rank", "effective", "for 99 %", "|sBA|", "use")
_GAIN_COLUMNS = ("step", "gains 1-99 %", "1 in bf16")


def _group(group: Group) -> list[str]:
    told = [
        group.kind, f"{len(group.layers)}", group.ranks, f"{group.effective_rank:.1f}",
        f"{group.rank_for_99:.0f}", f"{group.norm:.3g}", group.uses,
    ]  # fmt: skip
    span, step, swallowed = group.gain_span, group.step, group.swallowed(torch.bfloat16)
    if span is not None and swallowed is not None:
        told.append("-" if step is None else percent_text(step))
        told += [f"{span[0]:.4f}-{span[1]:.4f}", percent_text(swallowed)]
    return told


# Gains.


def gain_lines(audit: Audit) -> Iterator[RenderableType]:
    """What `hirank audit gains` prints."""
    if not audit.gains:
        yield _table(("layers", "count", "m", "|A|", "|B|"), map(_magnitudes, audit.groups()))
        yield Text("The gains m / |W + s B A| need the base model: give it with --base.")
        return
    yield _table(_GAINS, map(_gains, audit.groups()))
    yield Text(
        "1 in bf16: rows whose gain rounds to 1, -2^-9 <= g - 1 <= 2^-8; in fp16 8 times nearer. "
        "unmoved: m is still the norm of W. dead: the row gives zero."
    )


_GAINS = (
    "layers", "rows", "g least", "1 %", "median", "99 %", "most", "1 in bf16", "1 in fp16",
    "unmoved", "dead",
)  # fmt: skip


def _magnitudes(group: Group) -> list[str]:
    spans = [group.audit.magnitudes[x.name] for x in group.layers]
    norms = [statistics.median(x.factors[i] for x in group.layers) for i in (0, 1)]
    low, high = min(s[0] for s in spans), max(s[1] for s in spans)
    told = [group.kind, f"{len(group.layers)}", f"{low:.4g}-{high:.4g}"]
    return told + [f"{norm:.3g}" for norm in norms]


def _gains(group: Group) -> list[str]:
    found: list[LayerGains] = group.gains
    rows = torch.cat([g.gain for g in found]).double().sort().values
    picked = [rows[round(share * (len(rows) - 1))] for share in (0, 0.01, 0.5, 0.99, 1)]
    shares = [group.swallowed(dtype) or 0.0 for dtype in (torch.bfloat16, torch.float16)]
    counts = [sum(getattr(g, what) for g in found) for what in ("unmoved", "dead")]
    told = [group.kind, f"{len(rows):,}"] + [f"{float(g):.4f}" for g in picked]
    return told + [percent_text(s) for s in shares] + [f"{c:,}" for c in counts]


# Truncation.


def truncation_lines(done: Truncation) -> Iterator[RenderableType]:
    """What `hirank audit truncate` prints."""
    kinds: dict[str, list[Cut]] = {}
    for cut in done.cuts:
        kinds.setdefault(kind_of(cut.name), []).append(cut)
    yield _table(("layers", "count", "rank", "error", "worst"), map(_cuts, kinds.values()))
    size = percent_text(done.nbytes[1] / done.nbytes[0])
    yield Text(
        f"s B A is off by {percent_text(done.error)} in all; the file has {size} of its size."
    )
    if done.step_error is not None:
        yield Text(
            f"What the adapter changes of the weights, g (W + s B A) - W, is off by "
            f"{percent_text(done.step_error)}."
        )
    yield Text(f"Written: {done.folder}")


def _cuts(cuts: Sequence[Cut]) -> list[str]:
    ranks = [_span(cut.rank[i] for cut in cuts) for i in (0, 1)]
    errors = [cut.error / cut.norm if cut.norm else 0.0 for cut in cuts]
    told = [kind_of(cuts[0].name), f"{len(cuts)}", f"{ranks[0]} -> {ranks[1]}"]
    return told + [percent_text(statistics.median(errors)), percent_text(max(errors))]


def _span(values: Iterable[int]) -> str:
    low, *_, high = (*(found := sorted(values)), found[-1])
    return f"{low}" if low == high else f"{low}-{high}"


# Full fine-tunes.


def finetune_lines(found: Finetune) -> Iterator[RenderableType]:
    """What `hirank audit finetune` prints."""
    if not found.changes:
        yield Text(f"No matrix differs; {len(found.others)} vectors do.")
        return
    kinds: dict[str, list[Change]] = {}
    for change in found.changes:
        kinds.setdefault(kind_of(change.name), []).append(change)
    columns = ("weights", "count", "|W' - W|", "rank for 90 %", "for 99 %")
    yield _table(columns, (_changes(x, found.rank) for x in kinds.values()))
    yield Text("Floor: what adapters of that rank on every changed matrix miss of W' - W, at most.")
    floors = [(f"r {rank}", percent_text(found.floor(rank))) for rank in found.ranks()]
    yield Text("  " + ", ".join(f"{rank}: {floor}" for rank, floor in floors))
    yield Text(
        f"{len(found.unchanged)} weights did not change; {len(found.others)} vectors did, which no "
        "LoRA reaches."
    )


def _changes(changes: Sequence[Change], limit: int) -> list[str]:
    norm = statistics.median(change.spectrum.norm for change in changes)
    told = [kind_of(changes[0].name), f"{len(changes)}", f"{norm:.3g}"]
    for share in (0.9, 0.99):
        ranks = [change.spectrum.rank_for(share) for change in changes]
        highest = max((rank for rank in ranks if rank is not None), default=0)
        told.append(f"> {limit}" if None in ranks else f"{highest}")
    return told
