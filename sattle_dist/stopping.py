"""Asking a training run to stop: the first signal saves and ends it, the second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from sattle_dist.config import StoppedError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_SIGNAL = 1.0  # seconds: a scheduler may signal a process and its launcher, which passes it on


Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextlib.contextmanager
def handling(handler: Handler, signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> Iterator[None]:
    """Let a handler take these signals; but SIGHUP, which a terminal sends when it closes, not where nohup forbids it.

    Only the main thread can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number in signals if not (nohup and number == signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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

    def listening(self, signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> contextlib.AbstractContextManager[None]:
        """Take note of signals instead of ending."""
        return handling(self._note, signals)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and time.monotonic() - self._since > SAME_SIGNAL:
            os._exit(128 + number)
        if not self.number:
            self.number, self._since = number, time.monotonic()
