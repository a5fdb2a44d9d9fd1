"""The training run around the step: epochs, learning rate, checks, logging, evaluation, checkpoints, resuming."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sattle_dist import checkpoint
from sattle_dist.collectives import Group
from sattle_dist.config import Config, StoppedError
from sattle_dist.data import Batches
from sattle_dist.evaluator import evaluate, metrics
from sattle_dist.events import log_epoch
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner
from sattle_dist.progress import Progress
from sattle_dist.results import Result, report_test
from sattle_dist.schedule import learning_rate

REPORT_EVERY = 10  # steps; the loss is formed, and the device waited for, at these steps and at an epoch's last


class TrainingError(StoppedError):
    """A run that had to stop, said in one line for the user."""


class Trainer:
    """Trains one run. Every rank makes one and calls `run`."""

    def __init__(self, config: Config, graph: Graph, run_dir: Path, group: Group, device: torch.device) -> None:
        self.config, self.graph, self.run_dir, self.group = config, graph, run_dir, group
        self.learner = Learner(config, graph.num_entities, graph.num_relations, group, device)
        self.batches = Batches(
            graph.index("train"),
            batch_size=config.train.batch_size,
            weigh_by_targets=config.train.loss != "kvsall",
            seed=config.train.seed,
            sharding=self.learner.sharding,
            group=group,
            device=device,
        )
        self.epoch = self.step = 0
        self.on_step: Callable[[int, int], None] = lambda epoch, step: None  # told (epoch, step) as each step begins
        self.history: list[dict[str, Any]] = []
        # Rank 0 decides what all resume from: a folder may show later on another machine, or not at all.
        saved = checkpoint.list_checkpoints(run_dir)
        if newest := group.share(saved[-1].name if saved else ""):
            self._resume(run_dir / "checkpoints" / newest)
        num_queries = len(self.batches.index)
        self.progress = Progress(
            total_queries=config.train.epochs * num_queries,
            done_queries=self.epoch * num_queries,
            shown=group.rank == 0,
        )

    def run(self) -> Result:
        """Train the remaining epochs; return the result of the test split."""
        config = self.config
        while self.epoch < config.train.epochs:
            record = self._train_epoch()
            done = self.epoch + 1
            last = done == config.train.epochs
            if config.eval.eval_every and (done % config.eval.eval_every == 0 or last):
                record["valid"] = self._evaluate("valid")
            self._log(record)
            if last or done % config.run.save_every == 0:
                facts = {"graph_checksum": self.graph.checksum, "history": self.history}
                checkpoint.save(self.learner, self.run_dir, done, facts)
            self.epoch = done
        name = checkpoint.latest(self.run_dir).name
        return report_test(self.learner, self.graph, config, self.run_dir, checkpoint=name, epoch=self.epoch)

    def _train_epoch(self) -> dict[str, Any]:
        started, num_steps = time.monotonic(), self.batches.num_steps
        losses: list[float] = []
        # The first step of the epoch, on this rank, whose gradients were not finite.
        bad_step = torch.full((), torch.inf, dtype=torch.float64, device=self.learner.device)
        for step, batch in enumerate(self.batches.epoch(self.epoch)):
            self.step = step
            self.on_step(self.epoch, self.step)
            rate = learning_rate(self.config.train, self.epoch, self.step, num_steps)
            report = self.step % REPORT_EVERY == 0 or self.step == num_steps - 1
            loss = self.learner.step(batch, self.epoch, self.step, rate, report=report)
            finite = self.learner.gradient_norm().isfinite()
            bad_step = torch.where(finite, bad_step, bad_step.clamp_max(self.step))
            if loss is not None:
                losses.append(self._check(loss, bad_step))
            self.progress.advance(batch.num_queries, f"epoch {self.epoch + 1}/{self.config.train.epochs}", losses[-1])
        seconds = time.monotonic() - started
        return {
            "epoch": self.epoch + 1,
            "loss": sum(losses) / len(losses),
            "loss_steps": len(losses),
            "learning_rate": rate,
            "seconds": round(seconds, 3),
            "queries_per_second": round(len(self.batches.index) / seconds, 1),
        }

    def _check(self, loss: torch.Tensor, bad_step: torch.Tensor) -> float:
        """Give the loss summed over the shards; stop, on every rank, if any rank has seen a bad gradient."""
        everyone = self.group.all_gather(torch.stack([loss, bad_step])[None], "loss")  # [ranks, 2]
        total, first = everyone[:, 0].sum().item(), everyone[:, 1].min().item()
        if not math.isinf(first):
            saved = checkpoint.list_checkpoints(self.run_dir)
            kept = f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint had been written yet"
            raise TrainingError(
                f"a gradient was not finite at epoch {self.epoch + 1}, step {int(first) + 1}; {kept}. "
                f"Try a lower --learning-rate than {self.config.train.learning_rate}"
            )
        return total

    def _evaluate(self, split: str) -> dict[str, float]:
        positions = evaluate(self.learner, self.graph, split, self.config.eval.ties, self.config.train.seed)
        return metrics(positions.position, positions.candidates)

    def _resume(self, folder: Path) -> None:
        facts = checkpoint.read_facts(folder)
        checkpoint.load(self.learner, folder, with_optimizer=True)
        self.epoch, self.history = facts["epoch"], facts["history"]
        text = "".join(json.dumps(record) + "\n" for record in self.history)
        self._write(self.run_dir / "metrics.jsonl", text)

    def _log(self, record: dict[str, Any]) -> None:
        self.history.append(record)
        if self.group.rank == 0:
            with (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            if self.config.run.tensorboard == "on":
                log_epoch(record, self.run_dir)
        valid = record.get("valid")
        valid_text = f"  valid MRR {valid['mrr']:.4f}" if valid else ""
        self.progress.line(
            f"epoch {record['epoch']}/{self.config.train.epochs}  loss {record['loss']:.4f}"
            f"  {record['queries_per_second']:,.0f} queries/s{valid_text}"
        )

    def _write(self, path: Path, text: str) -> None:
        if self.group.rank == 0:
            path.write_text(text, encoding="utf-8")
