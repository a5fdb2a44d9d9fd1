"""The display of stages: a line each in a file, one rewritten line on a terminal."""

import io

from ingest.progress import StageDisplay


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(stream):
    with StageDisplay(stream) as progress:
        progress("read", 1000)
        progress("read", 2500)
        progress("sort train", 0)
    return stream.getvalue()


def test_a_line_a_stage_in_a_file():
    first, second = show(io.StringIO()).splitlines()
    assert first.startswith("  reading lines: ")
    assert ", 2,500 (" in first
    assert second.startswith("  sorting train: ")


def test_the_stage_under_way_is_shown_on_a_terminal():
    text = show(Terminal())
    assert text.count("\n") == 2
    shown = text.split("\r")
    assert "reading lines" in shown[1], "shown when it begins, not when it ends"
    assert any("sorting train" in piece and "\n" not in piece for piece in shown)
