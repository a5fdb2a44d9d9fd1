"""How every command ends: what a user can cause becomes one line and an exit code, never a traceback."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click

from ingest.errors import IngestError
from sattle_dist.config import StoppedError, UserError

EXIT_FAILED, EXIT_USAGE = 1, 2
EXIT_INTERRUPTED = 130
OTHERS_WAIT = 3.0  # seconds


def one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn what a user can cause into one line and exit code 2, a failing disk into 1, and Ctrl-C into 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            importlib.import_module("torch")  # which takes seconds
        except KeyboardInterrupt:
            click.echo("error: interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        try:
            return command(*args, **kwargs)
        except (UserError, IngestError) as error:
            fail(str(error), EXIT_USAGE)
        except StoppedError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            fail("interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:  # click ends in silence
            raise
        except OSError as error:
            fail(str(error), EXIT_FAILED)

    return wrapped


def fail(message: str, code: int) -> NoReturn:
    """End with this exit code and the message, which is said once where all processes of a machine have it."""
    from sattle_dist.runtime import Place, end_process

    place = Place.from_environment()
    if place.local_rank > 0 and code != EXIT_INTERRUPTED:
        time.sleep(OTHERS_WAIT)  # the first process of this machine says it and ends, and the launcher ends this one
    who = f"rank {place.rank}: " if place.rank > 0 else ""
    print(f"error: {who}{message}", file=sys.stderr, flush=True)
    end_process(code)
