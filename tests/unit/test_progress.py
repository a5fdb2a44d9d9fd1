"""What a watcher sees: share done, loss, speed and time left; a live line on a terminal, few lines in a log."""

from __future__ import annotations

import io

import pytest

from sattle_dist import progress
from sattle_dist.progress import Progress, format_seconds


class Screen(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def show(terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train 1,000 queries, 100 a second; half of them before this process started."""
    clock = iter(range(1000))
    screen = Screen(terminal=terminal)
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)) / 2)
    watcher = Progress(total_queries=1000, done_queries=500, shown=shown)
    watcher.advance(100, "epoch 6/10", 1.25)  # two readings of the clock: at 0.5 s and 1 s
    return screen.getvalue()


def test_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = show(True, True, monkeypatch)
    assert text.startswith("\r")
    assert "[############--------]  60%  epoch 6/10  loss 1.2500  100 queries/s  ETA 0:04" in text


def test_log_is_quiet_at_first_and_other_ranks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(False, True, monkeypatch) == ""
    assert show(True, False, monkeypatch) == ""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.1)
    assert show(False, True, monkeypatch) == " 60%  epoch 6/10  loss 1.2500  100 queries/s  ETA 0:04\n"


def test_durations() -> None:
    assert [format_seconds(s) for s in (0, 59.6, 61, 3599, 3600, 90_061)] == [
        *("0:00", "1:00", "1:01", "59:59", "1:00:00", "25:01:01")
    ]
