"""The page of an audit (see `hirank.page.html`).

Audit  ->  values (below)  ->  templates/audit.html
"""

from pathlib import Path
from typing import Any

import torch

from hirank.audit.charts import audit_charts, height
from hirank.audit.rank import LayerRank
from hirank.audit.summary import Audit, Group
from hirank.audit.table import about, suggested
from hirank.files import write_text
from hirank.page.charts import Chart
from hirank.page.html import Card, Status, render
from hirank.page.units import count_text, percent_text

__all__ = ["PAGE", "page_html", "write_page"]

PAGE = "audit.html"
MOST_LAYERS = 1000
"""Rows of the table of all layers."""


def write_page(audit: Audit, folder: Path) -> Path:
    """Write `folder/audit.html`, whole or not at all. Raises HirankError if it cannot."""
    return write_text(folder / PAGE, page_html(audit))


def page_html(audit: Audit) -> str:
    """The page as text."""
    charts = audit_charts(audit)
    return render("hirank.audit", "audit.html", _values(audit, charts), charts)


def _values(audit: Audit, charts: list[Chart]) -> dict[str, Any]:
    """Everything the template shows, as plain values; nothing here is HTML."""
    verdicts = audit.verdicts()
    layers = [_layer(audit, layer) for layer in audit.ranks[:MOST_LAYERS]]
    heights = [(number, height(chart)) for number, chart in enumerate(charts)]
    return {
        "title": audit.folder.resolve().name,
        "subtitle": _subtitle(audit),
        "status": _status(audit),
        "notices": [],
        "cards": [],  # verdicts come first
        "numbers": _cards(audit),
        "verdicts": verdicts,
        "groups": [_group(group) for group in audit.groups()],
        "with_gains": bool(audit.gains),
        "about": about(audit),
        "layers": layers,
        "layers_left": max(0, len(audit.ranks) - MOST_LAYERS),
        "suggestion": suggested(audit.suggestion()),
        "heights": [(number, pixels) for number, pixels in heights if pixels],
    }


def _subtitle(audit: Audit) -> str:
    method = "DoRA" if audit.dora else "LoRA"
    if audit.settings.get("use_rslora"):
        method += ", rank-stabilised"
    ranks = sorted({layer.rank for layer in audit.ranks})
    rank = f"r = {ranks[0]}" if len(ranks) == 1 else f"r = {ranks[0]} to {ranks[-1]}"
    base = str(audit.settings.get("base_model_name_or_path") or "")
    parts = [f"{method}, {rank}", f"{len(audit.ranks)} layers", Path(base).name]
    return " · ".join(part for part in parts if part)


def _status(audit: Audit) -> Status:
    levels = [verdict.level for verdict in audit.verdicts()]
    if "bad" in levels:
        return Status("failed", "does nothing")
    looks = levels.count("look")
    return Status("stopped", f"{looks} to look at") if looks else Status("finished", "all well")


def _cards(audit: Audit) -> list[Card]:
    layers = audit.ranks
    total, used = sum(x.rank for x in layers), sum(x.spectrum.effective_rank for x in layers)
    enough = sum(x.spectrum.rank_for(0.99) for x in layers)
    cards = [
        Card("Parameters", count_text(audit.parameters), "in A and B"),
        Card("Effective rank", percent_text(used / total), f"of all {total:,} ranks, by entropy"),
        Card("For 99 % of the energy", f"{enough:,}", f"of {total:,} ranks"),
    ]
    if audit.step is not None:
        cards.append(Card("Step", percent_text(audit.step), "of the adapted weights, Frobenius"))
    if audit.dora and audit.gains:
        rows = sum(found.rows for found in audit.gains.values())
        one = sum(found.share(torch.bfloat16) * found.rows for found in audit.gains.values()) / rows
        moved = 1 - sum(found.unmoved for found in audit.gains.values()) / rows
        cards.append(Card("Magnitudes that moved", percent_text(moved), f"of {rows:,} rows"))
        cards.append(Card("Gains that are 1 in bf16", percent_text(one), "their effect is gone"))
    return cards


def _group(group: Group) -> dict[str, str]:
    span, step = group.gain_span, group.step
    swallowed = group.swallowed(torch.bfloat16)
    return {
        "kind": group.kind,
        "count": f"{len(group.layers)}",
        "rank": group.ranks,
        "effective": f"{group.effective_rank:.1f}",
        "enough": f"{group.rank_for_99:.0f}",
        "norm": f"{group.norm:.3g}",
        "use": group.uses,
        "step": "" if step is None else percent_text(step),
        "span": "" if span is None else f"{span[0]:.4f} to {span[1]:.4f}",
        "swallowed": "" if swallowed is None else percent_text(swallowed),
    }


def _layer(audit: Audit, layer: LayerRank) -> dict[str, str]:
    found, gains = layer.spectrum, audit.gains.get(layer.name)
    return {
        "name": layer.name,
        "shape": f"{layer.shape[0]} x {layer.shape[1]}",
        "rank": f"{layer.rank}",
        "effective": f"{found.effective_rank:.1f}",
        "stable": f"{found.stable_rank:.1f}",
        "enough": f"{found.rank_for(0.99)}",
        "norm": f"{found.norm:.3g}",
        "use": layer.use,
        "unmoved": "" if gains is None else f"{gains.unmoved:,}",
        "dead": "" if gains is None else f"{gains.dead:,}",
    }
