"""The training run around the step: epochs, learning rate, checks, logging, evaluation, saving, stopping."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sattle_dist import checkpoint, grow, resume, teacher
from sattle_dist.collectives import Group
from sattle_dist.config import Config, StoppedError
from sattle_dist.data import Batches
from sattle_dist.evaluator import evaluate
from sattle_dist.events import log_epoch
from sattle_dist.files import replacing
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner
from sattle_dist.metrics import metrics
from sattle_dist.progress import Progress, show
from sattle_dist.results import Result, report_test
from sattle_dist.run import open_teachers
from sattle_dist.runtime import EXIT_DIVERGED
from sattle_dist.saver import Saver
from sattle_dist.schedule import learning_rate
from sattle_dist.selection import best_record, is_exhausted
from sattle_dist.stopping import Interrupted
from sattle_dist.storage import DamagedCheckpoint

REPORT_EVERY = 10  # steps; the loss is formed, and the device waited for, at these steps and at an epoch's last


EVALUATING = -1  # in place of a step, for `on_step`


class TrainingError(StoppedError):
    """A run that had to stop, said in one line for the user."""


class Diverged(TrainingError):
    """A run whose numbers have left what can be trained on; starting it again would not help."""

    exit_code = EXIT_DIVERGED


@dataclass
class EpochSoFar:
    """What an epoch's line of metrics.jsonl is made from; saved in the middle of an epoch, so that none is lost."""

    loss_sum: float = 0.0
    loss_steps: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains one run. Every rank makes one and calls `run`."""

    def __init__(self, config: Config, graph: Graph, run_dir: Path, group: Group, device: torch.device) -> None:
        self.config, self.graph, self.run_dir, self.group = config, graph, run_dir, group
        graph.hold()
        self.learner = Learner(config, graph.num_entities, graph.num_relations, group, device)
        self.batches = Batches(
            graph.index("train"),
            batch_size=config.train.batch_size,
            weigh_by_targets=config.train.loss != "kvsall",
            weight_power=config.train.weight_power,
            hearsay=config.train.hearsay,
            tell_relations=config.train.settled_discount > 0,
            seed=config.train.seed,
            sharding=self.learner.sharding,
            group=group,
            device=device,
        )
        self.epoch = self.step = 0  # epochs done, and steps of the next
        self.so_far = EpochSoFar()
        self.history: list[dict[str, Any]] = []
        self.on_step: Callable[[int, int], None] = lambda epoch, step: None  # told (epoch, step) as each step begins
        self.asked_to_stop: Callable[[], int] = lambda: 0  # gives the signal that asks this process to stop, or 0
        run = config.run
        self.lineage = {"graph": grow.describe(graph, group)}
        if run.teacher:
            self.learner.teachers, self.lineage["teacher"] = open_teachers(config, run_dir, graph, group, device)
        self.resumed_from = ""
        if found := resume.choose(run_dir, run.resume, group):
            self._resume(*found)
        elif begin := teacher.beginning(config, run_dir):
            self.lineage["grown_from"] = grow.load(self.learner, graph, config, begin.place)
        self.saver = Saver(
            self.learner, run_dir, keep=run.keep, background=run.saving == "background", timeout=run.timeout
        )
        self.saved = (self.epoch, self.step) if found else None
        self.saved_at = time.monotonic()
        num_queries = len(self.batches.index)
        self.progress = Progress(
            total_queries=config.train.epochs * num_queries,
            done_queries=self.epoch * num_queries + min(self.step * config.train.batch_size, num_queries),
            shown=group.rank == 0,
        )

    def run(self) -> Result:
        """Train the remaining epochs, then test."""
        self.train()
        return self.test()

    def train(self) -> None:
        """Train the remaining epochs and save the last."""
        while self.epoch < self.config.train.epochs and not is_exhausted(self.history, self.config.eval.patience):
            self._train_epoch()
            self._end_epoch()
        if problem := self.saver.wait():
            raise TrainingError(f"{problem}; {self._last_checkpoint()}")
        self._tell_of_saving()
        if stop := max(self.group.gather_objects(self.asked_to_stop())):
            self._save_or_stop(False, stop)

    def test(self) -> Result:
        """Evaluate test, once, with the best checkpoint; return its result."""
        name, epoch = self._take_best()
        self.on_step(self.epoch - 1, EVALUATING)
        return report_test(self.learner, self.graph, self.config, self.run_dir, checkpoint=name, epoch=epoch)

    def _train_epoch(self) -> None:
        """Train the rest of the epoch, and save or stop in its middle where that is asked for."""
        num_steps, so_far = self.batches.num_steps, self.so_far
        started = time.monotonic() - so_far.seconds
        # The first step of the epoch, on this rank, whose gradients were not finite.
        bad_step = torch.full((), torch.inf, dtype=torch.float64, device=self.learner.device)
        total: float | None = None  # the loss of the last step at which it was formed
        for batch in self.batches.epoch(self.epoch, self.step):
            self.on_step(self.epoch, self.step)
            rate = learning_rate(self.config.train, self.epoch, self.step, num_steps)
            report = self.step % REPORT_EVERY == 0 or self.step == num_steps - 1
            loss = self.learner.step(batch, self.epoch, self.step, rate, report=report)
            finite = self.learner.gradient_norm().isfinite()
            bad_step = torch.where(finite, bad_step, bad_step.clamp_max(self.step))
            self.step += 1
            if loss is not None:
                total, save, stop = self._confer(loss, bad_step)
                so_far.loss_sum += total
                so_far.loss_steps += 1
                so_far.seconds = time.monotonic() - started
                self._save_or_stop(save, stop)
            self.progress.advance(batch.num_queries, f"epoch {self.epoch + 1}/{self.config.train.epochs}", total)

    def _end_epoch(self) -> None:
        """Log the epoch, evaluate where that is due, and save what is due, best or last."""
        config, so_far, num_steps = self.config, self.so_far, self.batches.num_steps
        record: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "loss": so_far.loss_sum / so_far.loss_steps,
            "loss_steps": so_far.loss_steps,
            "learning_rate": learning_rate(config.train, self.epoch, num_steps - 1, num_steps),
            "seconds": round(so_far.seconds, 3),
            "queries_per_second": round(len(self.batches.index) / so_far.seconds, 1),
        }
        done = self.epoch + 1
        last = done == config.train.epochs
        if config.eval.eval_every and (done % config.eval.eval_every == 0 or last):
            began = time.monotonic()
            record["valid"] = self._evaluate("valid")
            record["eval_seconds"] = round(time.monotonic() - began, 3)
        record |= self.saver.times()
        self._log(record)
        self.epoch, self.step, self.so_far = done, 0, EpochSoFar()
        best = best_record(self.history) is record
        last = last or is_exhausted(self.history, config.eval.patience)
        asked = self.group.gather_objects((self._is_time_to_save(), self.asked_to_stop()))
        save, stop = asked[0][0], max(number for _, number in asked)
        self._save_or_stop(save or best or last or done % config.run.save_every == 0, stop)

    def _confer(self, loss: torch.Tensor, bad_step: torch.Tensor) -> tuple[float, bool, int]:
        """Give the loss summed over the shards, whether rank 0 finds it time to save, and the signal to stop, or 0.

        Stop, on every rank, if any rank has seen a bad gradient.
        """
        asked = torch.tensor([float(self._is_time_to_save()), float(self.asked_to_stop())], dtype=torch.float64)
        mine = torch.cat([torch.stack([loss.double(), bad_step]), asked.to(loss.device)])
        everyone = self.group.all_gather(mine[None], "loss")  # [ranks, 4]
        first = everyone[:, 1].min().item()
        if not math.isinf(first):
            self.saver.wait()  # for a good state that is still being written
            raise Diverged(
                f"a gradient was not finite at epoch {self.epoch + 1}, step {int(first) + 1}; "
                f"{self._last_checkpoint()}. Try a lower --learning-rate than {self.config.train.learning_rate}"
            )
        return everyone[:, 0].sum().item(), bool(everyone[0, 2].item()), int(everyone[:, 3].max().item())

    def _is_time_to_save(self) -> bool:
        return time.monotonic() - self.saved_at >= 60 * self.config.run.save_minutes

    def _save_or_stop(self, save: bool, stop: int) -> None:
        """Save if asked to; if there was a signal, save in any case, wait for it, and end. Every rank must call it."""
        self._warn(self.saver.problem())
        if (save or stop) and self.saved != (self.epoch, self.step):
            self._save()
        if stop:
            name = signal.Signals(stop).name
            if problem := self.saver.wait():
                raise TrainingError(f"stopped by {name}; {problem}; {self._last_checkpoint()}")
            where = self.run_dir / "checkpoints" / checkpoint.name_of(self.epoch, self.step)
            raise Interrupted(stop, f"stopped by {name}, saved as {where}")

    def _save(self) -> None:
        facts = {
            "epoch": self.epoch,
            "step": self.step,
            "epoch_so_far": dataclasses.asdict(self.so_far),
            "graph_checksum": self.graph.checksum,
            **self.lineage,
            "config": {section: dataclasses.asdict(getattr(self.config, section)) for section in ("model", "train")},
            "num_processes": self.group.world_size,
            "precision": self.config.run.precision,
            "history": list(self.history),
        }
        self._warn(self.saver.start(facts))
        self.saved, self.saved_at = (self.epoch, self.step), time.monotonic()

    def _resume(self, folder: Path, facts: dict[str, Any]) -> None:
        checkpoint.load(self.learner, folder, with_optimizer=True, facts=facts)
        self.epoch, self.step, self.history = facts["epoch"], facts["step"], facts["history"]
        self.so_far = EpochSoFar(**facts["epoch_so_far"])
        if "grown_from" in facts:
            self.lineage["grown_from"] = facts["grown_from"]
        self.resumed_from = folder.name
        before, now = facts.get("precision"), self.config.run.precision
        if before and before != now and self.group.rank == 0:
            show(
                f"warning: this run has multiplied in {before} so far and goes on in {now}: "
                "its numbers will be those of neither",
                err=True,
            )
        self._write_metrics()

    def _take_best(self) -> tuple[str, int]:
        """Go back to the weights of the best epoch by validation MRR, for the test; give their checkpoint and epoch."""
        history = self.history
        # Rank 0 looks: the best epoch's checkpoint may not have been written.
        while best := self.group.share(checkpoint.best_saved(self.run_dir, history)):
            epoch = int(best["epoch"])
            if (epoch, 0) == (self.epoch, self.step):
                break
            name = checkpoint.name_of(epoch, 0)
            folder = self.run_dir / "checkpoints" / name
            try:
                checkpoint.load(self.learner, folder, with_optimizer=False)
            except DamagedCheckpoint as error:  # before anything of it was taken
                history = [record for record in history if record["epoch"] != epoch]
                if self.group.rank == 0:
                    show(f"warning: {error}; it is set aside, and the best of the others is tested", err=True)
                    checkpoint.set_aside([folder])
                    checkpoint.tidy(self.run_dir, self.config.run.keep, history)  # `best` points elsewhere now
                continue
            self.progress.line(f"test is evaluated with the best epoch, {epoch}")
            return name, epoch
        return checkpoint.name_of(self.epoch, self.step), self.epoch

    def _last_checkpoint(self) -> str:
        saved = checkpoint.list_checkpoints(self.run_dir)
        return f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint had been written yet"

    def _tell_of_saving(self) -> None:
        saver = self.saver
        if saver.num_saved:
            self.progress.line(
                f"{saver.num_saved} checkpoint{'s' if saver.num_saved > 1 else ''} written in {saver.seconds:.1f} s, "
                f"for which training waited {saver.stalled:.1f} s"
            )

    def _warn(self, problem: str) -> None:
        if problem and self.group.rank == 0:
            show(f"warning: {problem}; training goes on, {self._last_checkpoint()}", err=True)

    def _evaluate(self, split: str) -> dict[str, float]:
        self.on_step(self.epoch, EVALUATING)
        positions = evaluate(self.learner, self.graph, split, self.config.eval.ties, self.config.train.seed)
        return metrics(positions.position, positions.candidates)

    def _log(self, record: dict[str, Any]) -> None:
        self.history.append(record)
        try:
            self._write_metrics()
            if self.group.rank == 0 and self.config.run.tensorboard == "on":
                log_epoch(record, self.run_dir)
        except OSError as error:  # the history is in every checkpoint too
            self._warn(f"the metrics of epoch {record['epoch']} could not be written: {error}")
        valid = record.get("valid")
        valid_text = f"  valid MRR {valid['mrr']:.4f}" if valid else ""
        self.progress.line(
            f"epoch {record['epoch']}/{self.config.train.epochs}  loss {record['loss']:.4f}"
            f"  {record['queries_per_second']:,.0f} queries/s{valid_text}"
        )

    def _write_metrics(self) -> None:
        self._write(self.run_dir / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in self.history))

    def _write(self, path: Path, text: str) -> None:
        """Replace a file of the run directory, all of it or nothing."""
        if self.group.rank == 0:
            with replacing(path) as draft:
                draft.write_text(text, encoding="utf-8")
