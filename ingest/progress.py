"""Show the stages of an ingest on standard error: a line that is rewritten on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

_EVERY_SECONDS = 0.2
_WORDS = {
    "download": "downloading bytes",
    "read": "reading lines",
    "label": "sorting labels",
    "number": "numbering triples",
    "split": "splitting",
    "labels": "writing labels",
    "checksum": "computing checksums",
    "place": "putting the graph in place",
}


class StageDisplay:
    """Prints every stage with the time it took."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._stage: str | None = None
        self._count = 0
        self._began = 0.0
        self._shown = 0.0

    def __call__(self, stage: str, count: int) -> None:
        """Say that `stage` is under way and has done `count`."""
        now = time.monotonic()
        if stage != self._stage:
            self._finish(now)
            self._stage, self._began, self._shown = stage, now, 0.0
        self._count = count
        # A stage is shown at once when it begins: it may say nothing more until it ends.
        if self._terminal and now - self._shown > _EVERY_SECONDS:
            self._stream.write("\r" + self._text(now) + "\x1b[K")
            self._stream.flush()
            self._shown = now

    def _text(self, now: float) -> str:
        assert self._stage is not None
        seconds = now - self._began
        text = f"  {_WORDS.get(self._stage, self._stage.replace('sort', 'sorting'))}: {seconds:.1f} s"
        if self._count:
            text += f", {self._count:,} ({self._count / max(seconds, 0.001):,.0f}/s)"
        return text

    def _finish(self, now: float) -> None:
        if self._stage is not None:
            end = "\x1b[K\n" if self._terminal else "\n"
            self._stream.write(("\r" if self._terminal else "") + self._text(now) + end)
            self._stream.flush()
        self._stage, self._count = None, 0

    def __enter__(self) -> StageDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(time.monotonic())
