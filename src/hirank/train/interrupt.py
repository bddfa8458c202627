"""Ctrl-C and SIGTERM: finish the step, save, stop. A second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

__all__ = ["Interrupt"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While active, a signal sets `requested`; a second one raises KeyboardInterrupt.

    Before `arm()` there is nothing worth saving, and the first signal already raises.
    `notify` is called once, from the signal handler, when a stop is requested.
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._armed = False
        self._notify = notify
        self._before: dict[signal.Signals, Any] = {}

    def arm(self) -> None:
        """From now on the first signal waits for the step to end."""
        self._armed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self._armed:
            raise KeyboardInterrupt
        self.requested = True
        self._notify()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._handle) for name in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)
