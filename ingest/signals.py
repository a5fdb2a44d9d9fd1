"""How a command ends when it is told to: by Ctrl-C, the SIGTERM of a batch system, or a terminal that closes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Clean up and leave with 128 + the signal's number, as a shell says it, at SIGINT, SIGTERM and SIGHUP.

    Under nohup SIGHUP stays ignored.
    The exception that a handler raises does not always arrive: inside a DuckDB call it becomes an error of DuckDB's
    own. Hence whatever comes out after a signal is taken for the signal's doing.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        sys.exit(128 + number)

    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heeded = (signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,)))
    before = {number: signal.signal(number, end) for number in heeded}
    try:
        yield
    except BaseException:
        if not received:
            raise
        with suppress(OSError):  # a terminal that has closed
            print(f"stopped by {signal.Signals(received[0]).name}", file=sys.stderr, flush=True)
        sys.exit(128 + received[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
