"""One HTML file that opens offline, in light and dark, at any width.

    values, charts -> a template that fills the blocks of templates/page.html -> text

All text of the user passes through Jinja's autoescape. What is not escaped is ours: style sheet,
script, Plotly, and the figures as JSON. A content security policy with the hashes of the two
scripts makes the browser run those and nothing else, and load nothing from anywhere.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hirank.page.charts import Chart

__all__ = ["Card", "Status", "render"]


@dataclass(frozen=True)
class Status:
    """The verdict at the top. `kind` picks the colour: finished, failed or anything else."""

    kind: str
    text: str


@dataclass(frozen=True)
class Card:
    """One headline number; `before` is empty where there is only one moment to tell of."""

    label: str
    value: str
    note: str
    before: str = ""


def render(owner: str, template: str, values: Mapping[str, Any], charts: Sequence[Chart]) -> str:
    """The page as text.

    Args:
        owner: the package that has the template in its folder `templates`.
        template: its file name; it extends `page.html`.
        values: everything the template shows, as plain values and never HTML: title, subtitle,
            status, notices and cards for the head of the page, and what the template asks for.
        charts: drawn where the template calls the macro `grid` of `parts.html`.
    """
    plotlyjs, js = get_plotlyjs(), _source("hirank.page", "page.js")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        loader=FunctionLoader(lambda name: _source("hirank.page", name)),
    )
    return environment.from_string(_source(owner, template)).render(
        values,
        charts=charts,
        css=Markup(_source("hirank.page", "page.css")),
        js=Markup(js),
        plotlyjs=Markup(plotlyjs),
        figures=Markup(_script_json([chart.figure.to_plotly_json() for chart in charts])),
        policy=_policy(plotlyjs, js),
    )


def _source(owner: str, name: str) -> str:
    return (resources.files(owner) / "templates" / name).read_text(encoding="utf-8")


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )
