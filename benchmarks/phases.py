"""Where the time of a training step goes, measured from outside: the step itself carries no timers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sattle_dist.learner import Learner


class Phases:
    """Wraps the parts of a learner so that the seconds spent in each are counted; a part inside another counts once."""

    def __init__(self, learner: Learner) -> None:
        self.seconds: Counter[str] = Counter()
        self._running: list[str] = []
        group, table = learner.group, learner.table
        self._wrap(group, "all_to_all", "exchange")
        self._wrap(learner.replicated, "forward", "encode")
        self._wrap(learner.optimizer, "step", "optimizer")
        self._wrap(table, "lookup", "lookup")
        self._wrap(table, "return_gradients", "lookup")
        compute = learner.loss
        learner.loss = self._timed(compute, "score")  # type: ignore[assignment]
        step = learner.step
        learner.step = self._timed(step, "encode backward and rest")  # type: ignore[method-assign]

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), phase))

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._running.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._running.pop()
                seconds = time.perf_counter() - started
                self.seconds[phase] += seconds
                if self._running:
                    self.seconds[self._running[-1]] -= seconds

        return timed
