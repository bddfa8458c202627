"""Third parties keep quiet while hirank talks: their chatter is not what a user has to read.

Warnings of hirank itself are shown, each as one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hirank.quiet import import_unheard, unheard

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["quiet", "say", "without_bars"]


def say(console: Console, text: str, style: str = "") -> None:
    """A line as it is: no markup, no guessed colours, no added line breaks."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def quiet(console: Console) -> Iterator[None]:
    """Show hirank's warnings on `console`, and of the libraries below it only errors."""
    with unheard(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"hirank(\.|$)")
        warnings.showwarning = lambda text, *rest: say(console, f"Warning: {text}", "yellow")
        import_unheard("peft")  # and so what talks at import, or sets its own level there
        yield


def without_bars() -> None:
    """No progress bars but ours. Imports what draws them, which takes seconds."""
    import datasets
    from transformers.utils import logging as transformers_logging

    disable: list[Any] = [
        datasets.disable_progress_bars,
        transformers_logging.disable_progress_bar,
    ]
    for each in disable:
        each()
