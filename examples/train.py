"""The main job: trains a SASRec-like model on parquet histories, on any number of ranks, CPU or GPU.

    torchrun --nproc-per-node 2 -m examples.train --data histories.parquet --num-items 10000

The dense part runs under DistributedDataParallel, the item table is sharded by rows (fs_embed), batches are balanced
across ranks (fs_data), and both travel over fs_comm. `--loader plain` and `--embeddings synchronous` are the baselines.
"""

import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from examples import checkpoint
from examples.data import Batch, NextItemTask, jagged
from examples.evaluate import check_columns, evaluate
from examples.launch import process_group, told_in_one_line
from examples.loaders import make_loader
from examples.metrics import normalized_entropy, straggler_share
from examples.model import ModelConfig, SequenceModel
from examples.settings import Settings, check_same_settings, parse
from examples.show import StepBar
from fs_data import JaggedColumn
from fs_embed import SGD, Adam, RowWiseAdagrad, TableOptimizers, prioritize, prioritized_modules

BETA2 = 0.98  # of Adam, as SASRec has it
ROW_OPTIMIZERS = {"rowwise_adagrad": RowWiseAdagrad, "sgd": SGD, "adam": partial(Adam, beta2=BETA2)}


@dataclass(slots=True)
class Progress:
    """Where the run is; travels with its checkpoints."""

    epoch: int = 0
    step: int = 0
    best_epoch: int = -1
    best_hit_rate: float = -1.0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(slots=True)
class Window:
    """Steps since the last line of the log: shared among ranks only there, so that logging costs the steps nothing."""

    loss_sums: list[Tensor] = field(default_factory=list)  # () float64 each: Σ loss over this rank's positions
    positions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """Sums over the run's steps and ranks."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    """Blocked by the tables' exchanges, while training."""
    compute_s: list[Tensor] = field(default_factory=list)  # (T, R) of each window
    positions: int = 0
    """Items that were to be predicted."""
    last_loss: float = 0.0


class Trainer:
    """One rank of the run: model, tables, optimizers, loader, and where they are."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)  # the same first weights on every rank
        config = ModelConfig(
            num_items=settings.num_items,
            max_length=settings.max_length,
            dim=settings.dim,
            num_blocks=settings.blocks,
            num_heads=settings.heads,
            dropout=settings.dropout,
        )
        self.model = SequenceModel(config).to(device, torch.float64 if settings.double else None)
        prioritize(
            self.model,
            optimizer=ROW_OPTIMIZERS[settings.embedding_optimizer](lr=settings.embedding_lr),
            mode=settings.embeddings,
            tables=["item_emb"],
            timeout_s=settings.timeout_s,
        )
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=settings.lr, betas=(0.9, BETA2))
        torch.manual_seed(settings.seed * 1000 + self.rank)  # dropout differs by rank
        self.task = NextItemTask(settings.num_items, settings.seed)
        self.loader = make_loader(settings, self.task, self.model, device)
        self.progress, self.totals = Progress(), Totals()
        if settings.evaluate:
            check_columns(settings.data)
        if not settings.resume:
            checkpoint.refuse_used(settings.out)
        if self.rank == 0:
            settings.out.mkdir(parents=True, exist_ok=True)
            for log in ("losses.jsonl", "validation.jsonl") if not settings.resume else ():
                (settings.out / log).unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the background threads of loader and tables."""
        self.loader.close()
        for _, table in prioritized_modules(self.model):
            table.close()

    def train(self) -> dict[str, float]:
        """All epochs; returns the run's figures, the same on every rank."""
        s, at = self.settings, self.progress
        if s.resume:
            self._resume()
        while at.epoch < s.epochs and not self._enough_steps():
            self._train_epoch()
            if s.evaluate:
                self._validate()
            if self._enough_steps():
                break
            at.epoch += 1
            if s.checkpoint_every:
                self._save()
        figures = self._figures()
        if s.evaluate and at.best_epoch >= 0:
            figures |= self._test_best()
        return figures

    def _train_epoch(self) -> None:
        at = self.progress
        self.task.epoch = at.epoch
        self.loader.set_epoch(at.epoch)
        window = Window()
        with StepBar(f"epoch {at.epoch}", enabled=self.rank == 0) as bar:
            started, exposed_before = time.perf_counter(), self._exposed_s()
            for batch in self.loader:
                self._step(batch, window)
                at.step += 1
                bar.advance()
                if at.step % self.settings.log_every == 0:
                    bar.say(self._log(window))
                    window = Window()
                if self.settings.checkpoint_every and at.step % self.settings.checkpoint_every == 0:
                    self._save()
                if self._enough_steps():
                    break
            self.totals.seconds += time.perf_counter() - started
            self.totals.exposed_s += self._exposed_s() - exposed_before
            if window.positions:
                bar.say(self._log(window))

    def _step(self, batch: Batch, window: Window) -> None:
        """One optimizer step on the mean loss over all positions of the global batch."""
        seq, pos, neg = (column.to(self.device, non_blocking=True) for column in jagged(batch, "seq", "pos", "neg"))
        losses = self.ddp(seq, pos.values, neg.values)  # (N,)
        loss = losses.sum() / max(len(losses), 1) * self.loader.loss_scale(batch, task="positions")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        window.loss_sums.append(losses.detach().sum(dtype=torch.float64))
        window.positions.append(len(losses))
        self.totals.samples += len(seq)

    def _exposed_s(self) -> float:
        """Seconds that this rank's training thread has been blocked by the tables' exchanges, evaluation included."""
        return sum(m.stats()["exposed_wait_s"] for _, m in prioritized_modules(self.model))

    def _enough_steps(self) -> bool:
        return 0 < self.settings.max_steps <= self.progress.step

    def _log(self, window: Window) -> str:
        """Collective: adds the window to the totals and to the log of losses, and returns a line that sums it up."""
        mine = torch.stack(
            [
                torch.stack(window.loss_sums).cpu(),
                torch.tensor(window.positions, dtype=torch.float64),
                torch.tensor(self.model.clock.take(), dtype=torch.float64),
            ]
        )  # (3, T)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        loss_sums, positions, compute_s = torch.stack(everyone).unbind(1)  # (R, T) each
        losses = (loss_sums.sum(0) / positions.sum(0).clamp(min=1)).tolist()
        mean = float(loss_sums.sum() / positions.sum().clamp(min=1))
        self.totals.positions += int(positions.sum())
        self.totals.steps += len(losses)
        self.totals.compute_s.append(compute_s.T)
        self.totals.last_loss = mean
        if self.rank == 0:
            first = self.progress.step - len(losses)
            with open(self.settings.out / "losses.jsonl", "a") as log:
                for step, value in enumerate(losses, first):
                    log.write(json.dumps({"step": step, "loss": value}) + "\n")
        return (
            f"step {self.progress.step}  loss {mean:.4f}  NE {normalized_entropy(mean):.4f}  "
            f"straggler {straggler_share(compute_s.T):.1%}"
        )

    def _figures(self) -> dict[str, float]:
        """Collective: what the run showed, the same on every rank."""
        t = self.totals
        sums = torch.tensor([t.exposed_s / self.world_size, t.samples], dtype=torch.float64)
        dist.all_reduce(sums)
        if not t.steps:
            if not self.settings.resume:  # else nothing was left to train
                raise ValueError(
                    f"{self.settings.data} must have a batch for each of the {self.world_size} ranks, or no step can "
                    "be taken: start fewer, or use --loader balanced"
                )
            return {"steps": 0}
        if not t.positions:
            raise ValueError(
                f"{self.settings.data} must have a history of two items or more, one to predict the other from; it has "
                "none"
            )
        return {
            "steps": t.steps,
            "loss": t.last_loss,
            "normalized_entropy": normalized_entropy(t.last_loss),
            "straggler": straggler_share(torch.cat(t.compute_s)),
            "exposed_ms_per_step": 1000 * float(sums[0]) / t.steps,
            "samples_per_s": float(sums[1]) / max(t.seconds, 1e-9),
        }

    def _validate(self) -> None:
        """Collective: scores the validation items, and keeps the model of the best epoch."""
        s, at = self.settings, self.progress
        found = self._evaluate("validation")
        if self.rank == 0:
            print(
                f"epoch {at.epoch}  validation HR@10 {found['hit_rate']:.4f}  NDCG@10 {found['ndcg']:.4f}", flush=True
            )
            with open(s.out / "validation.jsonl", "a") as log:
                log.write(json.dumps({"epoch": at.epoch, **found}) + "\n")
        if found["hit_rate"] > at.best_hit_rate:
            at.best_hit_rate, at.best_epoch = found["hit_rate"], at.epoch
            checkpoint.save({"model": self.model}, s.out / "best", at.epoch, keep=1)

    def _evaluate(self, split: str) -> dict[str, float]:
        s = self.settings
        return evaluate(self.model, s.data, split, batch_size=4 * s.batch_size, device=self.device)

    def _test_best(self) -> dict[str, float]:
        """Collective: the test items' figures, with the model of the epoch that validation chose."""
        best = checkpoint.of_step(self.settings.out / "best", self.progress.best_epoch)
        checkpoint.load({"model": self.model}, best)
        found = self._evaluate("test")
        return {"best_epoch": self.progress.best_epoch, "test_hit_rate": found["hit_rate"], "test_ndcg": found["ndcg"]}

    def _state(self) -> dict[str, Any]:
        """Everything that a restart needs; what differs by rank carries the rank in its key."""
        return {
            "model": self.model,
            "tables": TableOptimizers(self.model),
            "optimizer": self.optimizer,
            "progress": self.progress,
            f"loader_of_rank_{self.rank}": self.loader,
            f"random_of_rank_{self.rank}": checkpoint.RandomState(),
        }

    def _save(self) -> None:
        checkpoint.save(self._state(), self.settings.out, self.progress.step)

    def _resume(self) -> None:
        path = checkpoint.newest(self.settings.out)
        if path is None:
            raise FileNotFoundError(
                f"--resume needs a checkpoint in {self.settings.out}, which has none; start without it"
            )
        self._discarded_step()
        checkpoint.load(self._state(), path)
        if self.rank == 0:
            print(f"resuming from {path}", flush=True)

    def _discarded_step(self) -> None:
        """One step whose every effect the checkpoint then overwrites.

        DDP sums gradients in another order after its first backward, so without it a restarted run would differ in the
        last bits on three and more ranks; and Adam makes its state, which loading needs a place for, in its first step.
        """
        one = torch.ones(1, dtype=torch.int64, device=self.device)
        seq = JaggedColumn.from_lengths(one, one)
        self.ddp(seq, one, one).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.clock.take()


def main(arguments: list[str] | None = None) -> None:
    with told_in_one_line():
        settings = parse(arguments)
        # Within the group too: said before it ends, since torchrun ends this rank when another has noticed that.
        with process_group(settings.timeout_s) as device, told_in_one_line():
            check_same_settings(settings)
            trainer = Trainer(settings, device)
            figures = trainer.train()
            trainer.close()
            if trainer.rank == 0:
                print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()), flush=True)
                if settings.report:
                    settings.report.parent.mkdir(parents=True, exist_ok=True)
                    settings.report.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
