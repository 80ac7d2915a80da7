"""One history: the starts of a run, each with the training loop of a user, and the log of what they received."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import midepoch
from midepoch.audit import Ledger
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.errors import CheckpointDamagedError, CheckpointSaveError, MidepochError
from simulation.cluster import Cluster, HangError, Killed, Rank
from simulation.disk import Disk
from simulation.plans import Plan, StartPlan
from simulation.site import Site
from simulation.store import Bucket

_TIMEOUT = 20.0
"""Seconds for which ranks wait for each other when they save."""
_MOST_STEPS = 150
"""Steps of the longest plan are 60: two epochs, of which each start may repeat some."""
ROT = "a bit has changed"
EDITS = {"exclude rows", "exclude steps", "set_weights"}
"""Features that change a run after some steps."""


class FindingError(AssertionError):
    """A history that breaks a rule."""


class Entry(NamedTuple):
    """Outputs that the weights have seen: one batch of a rank."""

    epoch: int
    step: int
    rank: int
    outputs: tuple[Any, ...]


@dataclass
class Mark:
    """A checkpoint: what the weights had seen when it was saved."""

    order: int
    before: tuple[Entry, ...]
    logs: list[list[Entry]]
    counts: dict[int, int] = field(default_factory=dict)
    weights: int = 0

    @property
    def kept(self) -> tuple[Entry, ...]:
        return self.before + tuple(entry for rank, count in self.counts.items() for entry in self.logs[rank][:count])


class Weights:
    """A model: its weights are those of a step of a start."""

    def __init__(self) -> None:
        self.value = np.zeros(16, np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = np.array(state["value"])


class History:
    """The state of a history while it runs."""

    def __init__(self, plan: Plan, site: Site, folder: Path) -> None:
        self.plan, self.site, self.folder = plan, site, folder
        site.cluster = self.cluster = Cluster(plan.seed)
        site.disk = self.disk = Disk(folder, self.cluster)
        site.bucket = self.bucket = Bucket(self.cluster)
        self.marks: dict[str, Mark] = {}
        self.durable = 0
        """The order of the last checkpoint whose save returned."""
        self.kept: tuple[Entry, ...] = ()
        self.logs: list[list[Entry]] = []
        self.trusted = True
        """False if a part of the ledger may be gone: by a loss of power, or an error when it was written."""
        self.events: list[str] = []
        self.rotten = False
        """True if a bit of a checkpoint has changed."""
        self.ahead: tuple[int, Any, tuple[Entry, ...]] | None = None
        """A start that loads a state of a rank that was ahead of the others, and what was delivered before."""
        self._before = 0  # faults before this start
        self._begun: dict[int, Mark | None] = {}
        """By rank, the checkpoint that is saved in the background."""
        self._saved: list[list[int]] = []
        """By rank, the steps that this start has begun to save."""

    @property
    def steps(self) -> set[int]:
        """The steps of the run, also of an epoch after those of the plan."""
        return {entry.step for entry in (*self.kept, *(entry for log in self.logs for entry in log))}

    @property
    def saved(self) -> set[int]:
        """Steps that the last start has saved."""
        return {*self._saved[0]}

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Outputs of the epochs of the plan that the weights have seen."""
        found = self.kept + tuple(entry for log in self.logs for entry in log)
        return tuple(entry for entry in found if entry.epoch < self.plan.epochs)

    def run(self) -> None:
        """Run all starts. Raises FindingError."""
        for number, start in enumerate(self.plan.starts):
            self._run(number, start, is_last=number == len(self.plan.starts) - 1)

    def _run(self, number: int, start: StartPlan, *, is_last: bool) -> None:
        cluster = self.cluster
        self.site.begin_start(start.connected)
        self._begun.clear()
        self._saved = [[] for _ in range(start.world)]
        self.logs, self._before = [[] for _ in range(start.world)], len(cluster.happened)
        if (
            start.rots is not None
            and not self.rotten
            and not self.disk.lost
            and self.disk.rot(self.folder / "checkpoint", start.rots)
        ):
            self.rotten = True
            cluster.happened.append(ROT)
        mains = [self._main(number, start, rank) for rank in range(start.world)]
        try:
            ranks = cluster.run(mains, list(start.faults))
        except HangError as problem:
            raise FindingError(f"start {number} hangs: {problem}") from None
        struck = cluster.happened[self._before :]
        self.events.append(f"start {number}: {', '.join(struck) or 'no fault'}; {_ends(ranks)}")
        if struck == [ROT]:  # there is an older checkpoint, to which all ranks fall back
            struck = []
        self.trusted = self.trusted and not cluster.power_lost and not any("error" in text for text in struck)
        for rank in ranks:
            self._check_exit(rank, bool(struck) and not is_last, number)
        if is_last and not struck and any(rank.problem is not None for rank in ranks):
            raise FindingError(f"the last start failed: {_ends(ranks)}")

    def _check_exit(self, rank: Rank, struck: bool, number: int) -> None:
        problem = rank.problem
        if problem is None or isinstance(problem, Killed):
            return
        if isinstance(problem, FindingError):
            raise problem
        if struck and isinstance(problem, (MidepochError, OSError, KeyboardInterrupt)):
            return
        raise FindingError(f"start {number}, rank {rank.number}: {type(problem).__name__}: {problem}") from problem

    # A rank

    def _main(self, number: int, start: StartPlan, rank: int) -> Callable[[], None]:
        def main() -> None:
            plan, case = self.plan, self.plan.case
            audit = Ledger(self.folder / "ledger", attempt=f"start {number}") if start.every else None
            loader = case.make(
                rank=rank,
                world=start.world,
                workers=start.workers,
                size=start.size,
                last=plan.last,
                audit=audit,
                window=start.window,
                pipeline=start.pipeline,
            )
            if not start.every:
                self._train(number, start, rank, loader, None, None)
                return
            address = "sim://bucket/run" if plan.remote else str(self.folder / "checkpoint")
            saver = PipelineCheckpoint(
                address, plan.keep, async_save=plan.in_background, rank=rank, world_size=start.world, timeout=_TIMEOUT
            )
            model = Weights() if plan.has_model else None
            step = None if start.forgets else saver.restore_latest(loader, model, rng=plan.has_generators)
            mark = "" if step is None else saver.metadata(step)["mark"]
            self._restored(mark, number, model)
            earlier = self._steps_of(saver) if start.forgets else set()
            if start.older is not None and step is not None:
                steps = self.cluster.agree(saver.steps())[0]
                try:
                    step = saver.restore(
                        loader, model, rng=plan.has_generators, step=steps[int(start.older * len(steps))]
                    )
                except CheckpointDamagedError:
                    if not (self.rotten or self.disk.lost):  # a power loss may leave a part of a step that was removed
                        raise
                mark = saver.metadata(step)["mark"]
                self._check_weights(mark, model)
                self.kept = self.marks[mark].kept
            if len(set(self.cluster.agree(mark))) > 1:
                raise FindingError(f"start {number}: the ranks restored different checkpoints")
            # At the end of an epoch, only some of the ranks may have a batch left to look at.
            if self.ahead is not None and self.ahead[0] == number:
                _, state, self.kept = self.ahead
                loader.load_state_dict(state)
                step = loader.steps
            if start.looks and (start.world == 1 or (step or 0) < 2) and loader._next_cursor().epoch < plan.epochs:
                self._look(loader)
            with saver:
                self._train(number, start, rank, loader, saver, step)
                try:
                    saver.wait()
                    self._note_durable(rank, None)
                except CheckpointSaveError as problem:
                    if not (self._tolerates(start) or (start.forgets and "is not replaced" in str(problem))):
                        raise
            before = self._saved[rank] and self._saved[rank][0] <= max(earlier, default=0)  # else it is a later one
            lost = earlier - self._steps_of(saver)
            if lost and before and not (self.rotten or self.disk.lost):
                raise FindingError(f"start {number} forgot to restore, and removed the steps {lost} of the one before")

        return main

    def _steps_of(self, saver: PipelineCheckpoint) -> set[int]:
        """Return the steps that are there, as all ranks see them."""
        return {*self.cluster.agree(saver.steps())[0]}

    def _tolerates(self, start: StartPlan) -> bool:
        """Return True if training goes on without a checkpoint: it does only if something has happened to it."""
        return start.tolerant and (self.rotten or len(self.cluster.happened) > self._before)

    def _note_durable(self, rank: int, mark: Mark | None) -> None:
        """Note that a checkpoint is saved. In the background, it is the one before."""
        if self.plan.in_background:
            self._begun[rank], mark = mark, self._begun.get(rank)
        self.durable = max(self.durable, 0 if mark is None else mark.order)

    def _look(self, loader: midepoch.Loader) -> None:
        """Take a batch as a sample, and choose the epoch that comes anyway."""
        epoch = loader._next_cursor().epoch
        for _ in loader:
            break
        loader.set_epoch(epoch)

    def _check_weights(self, mark: str, model: Weights | None) -> None:
        if model is not None and not (model.value == self.marks[mark].weights).all():
            raise FindingError(f"the weights {model.value[:1]} were restored, {self.marks[mark].weights} were saved")

    def _restored(self, mark: str, number: int, model: Weights | None) -> None:
        order = self.marks[mark].order if mark else 0
        struck = self.cluster.happened[self._before :]
        of_checkpoints = [text for text in struck if " ledger" not in text]
        unreadable = self.rotten or any(text.startswith(("error", "throttle", "lost")) for text in of_checkpoints)
        # Of a step that was being removed, a loss of power may leave the folder without its files.
        damaged = [text for text in self.site.complaints if not (self.disk.lost and "there is no manifest" in text)]
        if damaged and not unreadable:
            raise FindingError(f"start {number} found a damaged checkpoint: {damaged[0]}")
        forgets = self.plan.starts[number].forgets
        if order < self.durable and not (unreadable or forgets):
            raise FindingError(f"start {number} restored checkpoint {order}, and {self.durable} was saved")
        self.durable = min(order, self.durable) if unreadable and not forgets else self.durable
        self.kept = self.marks[mark].kept if mark else ()
        if mark:
            self._check_weights(mark, model)

    def _train(
        self, number: int, start: StartPlan, rank: int, loader: midepoch.Loader, saver: Any, restored: int | None
    ) -> None:
        plan, cluster, step = self.plan, self.cluster, restored or 0
        model = Weights() if plan.has_model else None
        taker: Taker = (
            Leases(self, loader, rank, pauses=start.pauses, eager=start.eager)
            if "lease" in plan.features
            else Paused(self, loader, rank)
            if start.pauses
            else Batches(self, loader, rank, chooses=start.chooses)
        )

        saves, by_steps = count(1), {"lease", "steps_per_epoch"} <= {*plan.features}

        def save() -> None:
            if saver is None:
                return
            self._lag(start, rank, step, "save")
            name = f"{number}.{next(saves)}"
            mark = self.marks.get(name) or Mark(len(self.marks) + 1, self.kept, self.logs)
            self.marks[name] = mark
            mark.counts[rank] = len(self.logs[rank])
            self._saved[rank].append(step)
            mark.weights = 1000 * number + step
            if model is not None:
                model.value[:] = mark.weights
            try:
                saver.save(loader, model, step=step, metadata={"mark": name}, rng=plan.has_generators)
                self._note_durable(rank, mark)
            except CheckpointSaveError as problem:
                self._begun.pop(rank, None)
                apart = by_steps and "one state cannot hold both" in str(problem)  # in different epochs of the data
                refused = start.forgets and "is not replaced" in str(problem)
                if not (self._tolerates(start) or apart or refused):
                    raise

        def edit() -> None:
            if step == plan.edit_at:
                if step and "lease" in plan.features:
                    taker.end_pass()  # with gaps in what is acknowledged
                for change in plan.case.edits:
                    try:
                        change(loader)
                    except ValueError as problem:
                        # With large batches an epoch has too few steps. Leases may reach into another phase.
                        if not any(text in str(problem) for text in ("is not in epoch", "leases that were ack")):
                            raise

        empty = 0
        if restored is not None and all(cluster.agree(loader._next_cursor().epoch >= plan.epochs)):
            save()
            return
        if restored is None:
            edit()
        elif start.saves_first:
            save()
        returns = start.returns if saver is not None else None
        while True:
            self._lag(start, rank, step, "batch")
            try:
                has_batch = taker.take(step + 1)
            except KeyboardInterrupt:
                if start.world == 1:
                    save()
                raise
            over = has_batch and taker.epoch >= plan.epochs
            received = cluster.agree((has_batch, over))
            all_over = any(has for has, _ in received) and all(over for has, over in received if has)
            if all_over and (not by_steps or all(cluster.agree(loader._next_cursor().epoch >= plan.epochs))):
                save()  # the epoch before was at its end, which was not known
                return
            if not any(has for has, _ in received):
                empty += 1
                taker.end_pass()
                if empty > 2:
                    raise FindingError(f"start {number}, rank {rank}: three passes without a batch")
                beyond = cluster.agree(loader._next_cursor().epoch >= plan.epochs)
                if all(beyond) if "lease" in plan.features else any(beyond):  # with leases, ranks go at their own pace
                    save()
                    return
                continue
            empty, step = 0, step + 1
            if step > _MOST_STEPS:
                raise FindingError(f"start {number}, rank {rank}: the run does not end")
            edit()
            leaves = start.exit if start.exit is not None and start.exit.step <= step else None
            if start.drifts and step > 1:
                more = rank > 0 or taker.take(step + 1)
                if all(cluster.agree(more)):
                    self._save_apart(loader, saver, step)
                if start.foolish and more and not rank:
                    entries = tuple(entry for log in self.logs for entry in log)
                    self.ahead = (number + 1, loader.state_dict(), self.kept + entries)
                cluster.happened.append("a rank takes a batch more")
                return
            if (start.every and step % start.every == 0) or (leaves is not None and leaves.kind == "preempt"):
                save()
            if start.probes:
                self._probe(number, start, rank, loader)
            if returns is not None and step >= returns and self._steps_of(saver):
                returns = None
                if (back := self._return(number, start, rank, loader, model, saver, taker)) is None:
                    return
                step = back
                if all(cluster.agree(loader._next_cursor().epoch >= plan.epochs)):
                    save()
                    return
            if leaves is not None and (leaves.kind != "kill" or leaves.rank == rank):
                if leaves.kind == "kill":
                    cluster.die(f"kill of rank {rank} after step {step}")
                cluster.happened.append(f"{leaves.kind} after step {step}")
                cluster.agree(None)
                taker.end_pass()
                return

    def _lag(self, start: StartPlan, rank: int, step: int, where: str) -> None:
        lag = start.lag
        if lag is None or (lag.rank, lag.step, lag.where) != (rank, step, where) or start.world == 1:
            return
        if lag.seconds > _TIMEOUT:
            self.cluster.happened.append(f"rank {rank} is {lag.seconds} s late")
        self.cluster.sleep(lag.seconds)

    def _return(
        self, number: int, start: StartPlan, rank: int, loader: Any, model: Weights | None, saver: Any, taker: Taker
    ) -> int | None:
        """Restore the latest checkpoint in the middle of training, and return its step."""
        cluster = self.cluster
        try:
            saver.wait()
            self._note_durable(rank, None)
        except CheckpointSaveError:
            if not self._tolerates(start):
                raise
        if rank % 2 or isinstance(taker, Leases):  # before it or after it
            taker.end_pass()
        step: int | None = saver.restore_latest(loader, model, rng=self.plan.has_generators)
        taker.end_pass()
        if isinstance(taker, Leases):
            taker.acknowledge_late()
        mark = "" if step is None else saver.metadata(step)["mark"]
        if len(set(cluster.agree(mark))) > 1:
            raise FindingError(f"start {number}: the ranks restored different checkpoints in the same process")
        if not rank:
            self._restored(mark, number, model)
            self.logs = [[] for _ in range(start.world)]
        cluster.agree(None)
        self.events.append(f"start {number}: restored step {step} in the same process") if not rank else None
        return step

    def _probe(self, number: int, start: StartPlan, rank: int, loader: midepoch.Loader) -> None:
        """Load the state into another loader, which has to be at the same place."""
        state = loader.state_dict()
        other = self.plan.case.make(
            rank=rank,
            world=start.world,
            size=start.size,
            last=self.plan.last,
            window=start.window,
            pipeline=start.pipeline,
        )
        other.load_state_dict(state)
        loaded, expected = _without_branches(other.state_dict()), _without_branches(state)
        if loaded != expected:
            raise FindingError(f"start {number}: a loader with the state {expected} is at {loaded}")

    def _save_apart(self, loader: midepoch.Loader, saver: Any, step: int) -> None:
        """Save when ranks are at different steps, which has to be refused."""
        try:
            saver.save(loader, step=step, metadata={"mark": "apart"}, rng=False)
            saver.wait()
        except (MidepochError, OSError):
            return
        raise FindingError("a checkpoint of ranks at different steps was saved")

    def log(self, rank: int, step: int, epoch: int, batch: Any) -> None:
        self.logs[rank].append(Entry(epoch, step, rank, tuple(self.plan.case.rows(batch))))


def _without_branches(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without what only a ledger knows."""
    return {**state, "more": [entry for entry in state.get("more", ()) if entry[0] != "branches"]}


def _ends(ranks: list[Rank]) -> str:
    names = [type(rank.problem).__name__ if rank.problem is not None else "done" for rank in ranks]
    return ", ".join(f"rank {number} {name}" for number, name in enumerate(names))


class Batches:
    """Plain iteration, pass after pass."""

    def __init__(self, history: History, loader: midepoch.Loader, rank: int, *, chooses: bool) -> None:
        self._history, self._loader, self._rank, self._chooses = history, loader, rank, chooses
        self._pass: Iterator[Any] | None = None
        self.epoch = 0
        """That of the batch taken last."""

    def take(self, step: int) -> bool:
        """Take a batch. Returns False at the end of the pass."""
        if self._pass is None:
            if self._chooses:
                self._loader.set_epoch(self._loader.epoch)
            self._pass = iter(self._loader)
        for batch in self._pass:
            self.epoch = self._loader._run.cursor.epoch
            self._history.log(self._rank, step, self.epoch, batch)
            return True
        return False

    def end_pass(self) -> None:
        self._pass = None


class Paused:
    """Batches by ``next(loader)``, which is closed in between on all ranks."""

    def __init__(self, history: History, loader: midepoch.Loader, rank: int) -> None:
        self._history, self._loader, self._rank, self._over = history, loader, rank, False
        self.epoch = 0

    def take(self, step: int) -> bool:
        """Take a batch. Returns False at the end of the pass."""
        if self._over:
            return False
        if random.Random(f"{self._history.plan.seed} {step}").random() < 0.3:
            self._loader.close()
        for batch in self._loader.current_pass():  # as next() does it
            self.epoch = self._loader._run.cursor.epoch
            self._history.log(self._rank, step, self.epoch, batch)
            return True
        self._loader.end_pass()
        self._over = True
        return False

    def end_pass(self) -> None:
        self._over = False


class Leases:
    """Leases, acknowledged some steps later. The weights have seen what is acknowledged."""

    def __init__(self, history: History, loader: midepoch.Loader, rank: int, *, pauses: bool, eager: bool) -> None:
        self._history, self._loader, self._rank, self._pauses, self._eager = history, loader, rank, pauses, eager
        self._items: Any = None
        self.epoch = 0
        self._out: list[tuple[Any, int, int]] = []
        self._left: list[Any] = []
        self._early = False  # the lease that is out is of the next epoch
        self._least = int(history.cluster.random.random() < 0.3)  # one is out for long
        self._clears = random.Random(f"{history.plan.seed} {rank} clears")

    def take(self, step: int) -> bool:
        epochs = self._history.cluster.agree(self._loader._next_cursor().epoch)
        self._early = self._early and epochs[self._rank] > min(epochs)
        if self._items is None and epochs[self._rank] > min(epochs):  # others have to finish their epoch first
            if not self._eager:
                return False
            self._items = self._loader.lease().__enter__()
            self._out, self._early = [(next(self._items), step, epochs[self._rank])], True
            self.epoch = epochs[self._rank]
        if self._early:
            return True
        if self._pauses and self._items is not None and self._history.cluster.random.random() < 0.1:
            self.end_pass()  # those that are out come again
        if self._items is None:
            self._items = self._loader.lease().__enter__()
        waits = "steps_per_epoch" in self._history.plan.features  # for all leases at the end of an epoch of the data
        least = 0 if waits else self._least
        while len(self._out) > (0 if waits else max(least, self._history.cluster.random.choice((0, 1, 2, 4)))):
            self._ack(least)
        try:
            lease, self.epoch = next(self._items), self._loader._run.cursor.epoch
            self._out.append((lease, step, self.epoch))
            del lease
            while self._out and not self._least and self._clears.random() < 0.5:  # also the one that it has just taken
                self._ack(0)
        except StopIteration:
            while self._out:
                self._ack(0)
            if self._eager:
                self.end_pass()
            return False
        return True

    def _ack(self, least: int) -> None:
        draws = self._history.cluster.random  # later ones rather than those that have been out for long
        lease, step, epoch = self._out.pop(max(draws.randrange(least, len(self._out)) for _ in range(2)))
        lease.ack() if self._history.cluster.random.random() < 0.8 else lease.reject()  # for the loader it is done
        self._history.log(self._rank, step, epoch, lease.batch)

    def end_pass(self) -> None:
        if self._items is not None:
            self._items.__exit__(None, None, None)
        self._left += [lease for lease, _, _ in self._out]
        self._items, self._out = None, []

    def acknowledge_late(self) -> None:
        """Acknowledge leases of before a restore, which has to be refused."""
        for lease in self._left:
            with suppress(ValueError):
                if lease.ack():
                    raise FindingError(f"lease {lease.id} of before the restore was acknowledged")
        self._left.clear()


Taker = Batches | Paused | Leases


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=parent))  # tests look for what has our name
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@lru_cache(maxsize=16_384)
def uninterrupted(plan: Plan, site: Site) -> tuple[Entry, ...]:
    """Return the log of a plan of one start without faults: no checkpoint is saved, and no ledger is kept."""
    before = vars(site).copy()
    with folder_in_memory() as folder:
        history = History(plan, site, folder)
        history.run()
    vars(site).update(before)
    return history.entries


def as_uninterrupted(plan: Plan, world: int, size: int, features: tuple[str, ...], last: str) -> Plan:
    """Return the plan of an uninterrupted run. Equal ones are equal values, whatever history they are compared with."""
    start = StartPlan(world, size, every=0, connected=True)
    edit_at = plan.edit_at if EDITS.intersection(features) else 0
    return Plan(0, features, plan.pipeline, (start,), last, False, None, plan.epochs, edit_at)
