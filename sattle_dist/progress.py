"""What a person watching a run sees: one live line on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import contextlib
import sys
import time

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 30.0


def show(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print, and go on where that fails: a training is worth more than the pipe or the disk that its log goes to."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr if err else sys.stdout, flush=True)


class Progress:
    """Shows how far a run is; silent on ranks other than 0."""

    def __init__(self, *, total_queries: int, done_queries: int, shown: bool, unit: str = "queries") -> None:
        self.total, self.done, self.shown, self.unit = total_queries, done_queries, shown, unit
        self.live = sys.stderr is not None and sys.stderr.isatty()
        self.started = self.last_shown = time.monotonic()
        self.done_at_start = done_queries

    @property
    def queries_per_second(self) -> float:
        return (self.done - self.done_at_start) / max(time.monotonic() - self.started, 1e-9)

    def advance(self, num_queries: int, where: str, loss: float | None) -> None:
        """Count trained queries and show them, if enough time has gone by since the last showing."""
        self.done += num_queries
        now = time.monotonic()
        if not self.shown or now - self.last_shown < (TERMINAL_SECONDS if self.live else LOG_SECONDS):
            return
        self.last_shown = now
        share = self.done / self.total
        loss_text = "" if loss is None else f"  loss {loss:.4f}"
        speed = self.queries_per_second
        eta = format_seconds((self.total - self.done) / max(speed, 1e-9))
        text = f"{where}{loss_text}  {speed:,.0f} {self.unit}/s  ETA {eta}"
        if self.live:
            filled = round(20 * share)
            bar = "#" * filled + "-" * (20 - filled)
            show(f"\r\x1b[K[{bar}] {share:4.0%}  {text}", err=True, end="")
        else:
            show(f"{share:4.0%}  {text}", err=True)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        if self.shown:
            show(text)

    def clear(self) -> None:
        """Take the live line away."""
        if self.shown and self.live:
            show("\r\x1b[K", err=True, end="")


def format_seconds(seconds: float) -> str:
    """Write a duration as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
