"""The installed commands: loading what they need, which takes a second or more, and output that cannot be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def sattle() -> None:
    """Run `sattle`."""

    def load() -> Callable[[], object]:
        from sattle_dist.cli import main

        return main

    run(load)


def sattle_ingest() -> None:
    """Run `sattle-ingest`."""

    def load() -> Callable[[], object]:
        from ingest.cli import main

        return main

    run(load)


def run(load: Callable[[], Callable[[], object]]) -> None:
    """Load a command and run it; Ctrl-C and a failing disk end both in one line."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        try:
            load()()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        end("interrupted", 130)
    except BrokenPipeError:  # nobody reads any more
        end("", 1)
    except OSError as error:
        end(str(error), 1)


def end(message: str, code: int) -> None:
    """End with this message, if any, and without what standard output still holds: it cannot be written."""
    if message:
        print(f"error: {message}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
