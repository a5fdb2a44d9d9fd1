"""Do jobs in other threads, a few of them waiting at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_WAITING = 8


class Background:
    """Threads that work while the caller prepares what comes next; the error of a job is raised to the caller.

    With one thread, the jobs are done in the order they come.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(num_threads)
        self._jobs: deque[Future[None]] = deque()

    def submit(self, job: Callable[..., None], *arguments: object) -> None:
        while len(self._jobs) >= _WAITING:
            self._jobs.popleft().result()
        self._jobs.append(self._pool.submit(job, *arguments))

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for all jobs; after an error, only for the one at work."""
        try:
            while self._jobs and kind is None:
                self._jobs.popleft().result()
        finally:
            self._pool.shutdown(cancel_futures=True)
