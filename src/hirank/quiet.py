"""What other libraries say and is no error stays with them: a user of ours need not read it."""

from __future__ import annotations

import importlib
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

__all__ = ["import_unheard", "unheard"]

# they set up handlers of their own; what any other logs goes to the last resort
_CHATTY = ("accelerate", "datasets", "huggingface_hub", "peft", "torch", "transformers", "trl")


@contextmanager
def unheard() -> Iterator[None]:
    """Of what libraries log only errors are shown, those included that nobody here knows."""
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    last = logging.lastResort
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.lastResort = logging.StreamHandler()
    logging.lastResort.addFilter(_ours_or_an_error)
    try:
        yield
    finally:
        logging.lastResort = last
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _ours_or_an_error(record: logging.LogRecord) -> bool:
    ours = record.name.split(".")[0] == "hirank"
    return record.levelno >= (logging.WARNING if ours else logging.ERROR)


def import_unheard(name: str) -> None:
    """Import a module, and with it what it imports where it is installed; prints are not shown."""
    with unheard(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        importlib.import_module(name)
