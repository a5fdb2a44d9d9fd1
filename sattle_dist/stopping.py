"""Asking a training run to stop: the first signal saves and ends it, the second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from sattle_dist.config import StoppedError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_SIGNAL = 1.0  # seconds: a scheduler may signal a process and its launcher, which passes it on


class Interrupted(StoppedError):
    """A run that was asked to stop, and has."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopRequest:
    """Whether this process has been asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.number = 0  # of the signal; 0 while there was none
        self._since = 0.0

    @contextlib.contextmanager
    def listening(self, signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> Iterator[None]:
        """Take note of signals instead of ending; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in signals}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and time.monotonic() - self._since > SAME_SIGNAL:
            os._exit(128 + number)
        if not self.number:
            self.number, self._since = number, time.monotonic()
