"""Bugs, planted in the library one at a time: each must be found within a number of histories."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from midepoch.audit.ledger import Ledger
from midepoch.audit.records import Count
from midepoch.checkpoint import background, local, manager, manifest, saving
from midepoch.checkpoint.rendezvous import Leader
from midepoch.checkpoint.store import Steps
from midepoch.loader import leases, passes, state, workers
from midepoch.loader.loader import Loader
from midepoch.order.intervals import EMPTY
from midepoch.pipeline.cursor import LaneCursor
from midepoch.state import saved

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, Plant] = {}


def planted(function: Plant) -> Plant:
    PLANTED[function.__name__.replace("_", " ").strip()] = function
    return function


@planted
def a_state_one_row_ahead(patch: pytest.MonkeyPatch) -> None:
    """An off-by-one in a cursor: a loaded state of positions begins one row later."""
    real = state.load

    def load(spec: Any, cursor: Any) -> Any:
        if spec.unit == "rows" and cursor.lane.taken and cursor.lane.at is None:
            lane = replace(cursor.lane, taken=cursor.lane.taken + 1)
            cursor = cursor._replace(lanes={**cursor.lanes, 0: lane})
        return real(spec, cursor)

    patch.setattr(state, "load", load)


@planted
def a_lane_one_output_back(patch: pytest.MonkeyPatch) -> None:
    """Another one: the state of lanes forgets the output of its last step."""
    real = Loader.state_dict

    def state_dict(self: Loader) -> dict[str, Any]:
        found = real(self)
        if found["unit"] == "outputs" and len(found["cursor"]) > 1:
            found["cursor"] = found["cursor"][:-1]
        return found

    patch.setattr(Loader, "state_dict", state_dict)


@planted
def a_state_of_what_was_asked_for(patch: pytest.MonkeyPatch) -> None:
    """The state moves before the batch is delivered: an interrupt in between loses it."""
    real = passes.Pass._fail

    def fail(self: passes.Pass, problem: BaseException) -> None:
        if self.feed is not None and self.feed.plan is not None and self._made > self.delivered:
            self._loader._run = self._loader._run._replace(at=self.feed.end)
        real(self, problem)

    patch.setattr(passes.Pass, "_fail", fail)


@planted
def the_same_epoch_again(patch: pytest.MonkeyPatch) -> None:
    """An epoch boundary: the run continues with the epoch that is over."""
    real = state.finish

    def finish(run: Any, end: Any, **how: Any) -> Any:
        found = real(run, end, **how)
        return found._replace(next=found.next._replace(epoch=end.epoch)) if not how["rolled"] else found

    patch.setattr(state, "finish", finish)


@planted
def an_excluded_row_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The state does not hold the rows that are excluded."""
    real = saved.save

    def save(spec: Any, *arguments: Any) -> dict[str, Any]:
        return real(replace(spec, excluded=()) if spec.excluded else spec, *arguments)

    patch.setattr(saved, "save", save)


@planted
def weights_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A resume continues with the first weights of a mix."""
    real = saved.load_global

    def load(states: Any, spec: Any, allow: Any, planning: Any) -> Any:
        found = real(states, spec, allow, planning)
        return found._replace(spec=spec) if hasattr(found, "_replace") else replace(found, spec=spec)

    patch.setattr(saved, "load_global", load)


@planted
def an_early_acknowledgement_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A state has the oldest lease that is out, and not the later ones that are acknowledged."""
    real = leases.Tracker.frontier

    def frontier(self: leases.Tracker) -> Any:
        found = real(self)
        self._taken.__dict__.update({"_outputs": {}} if hasattr(self._taken, "_outputs") else {})
        return found

    patch.setattr(leases.Tracker, "frontier", frontier)


@planted
def a_lost_sync_of_a_file(patch: pytest.MonkeyPatch) -> None:
    """The files of a checkpoint are not synced."""
    patch.setattr(local, "create_file", _create_without_sync())


def _create_without_sync() -> Any:
    from contextlib import contextmanager

    @contextmanager
    def create_file(path: Any) -> Any:
        descriptor = local.os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        sink = local.LocalSink(descriptor)
        try:
            yield sink
        finally:
            local.os.close(descriptor)

    return create_file


@planted
def a_lost_sync_of_the_folder(patch: pytest.MonkeyPatch) -> None:
    """The name of a step is not synced: a checkpoint that was reported is gone."""
    real = local.sync
    patch.setattr(local, "sync", lambda path: None if path.name == "checkpoint" else real(path))


@planted
def a_swapped_rename(patch: pytest.MonkeyPatch) -> None:
    """A step gets its name before its files are complete."""
    real = local.LocalStore.commit

    def commit(self: local.LocalStore, step: int, token: str, content: bytes) -> str:
        if not (self.path / f"step_{step}").exists():
            local.os.rename(self.path / self.attempt(step, token), self.path / f"step_{step}")
            with local.create_file(self.path / f"step_{step}" / manifest.NAME) as sink:
                sink.write(memoryview(content))
            local.sync(self.path)
            return f"step_{step}"
        return real(self, step, token, content)

    patch.setattr(local.LocalStore, "commit", commit)


@planted
def a_replaced_step_is_removed_first(patch: pytest.MonkeyPatch) -> None:
    """Old steps are removed before the new one is committed."""
    real = saving._write

    def write(steps: Any, job: Any, token: str, world: Any) -> Any:
        if not world.rank:
            for step in steps.numbers():
                steps.remove(step)
        return real(steps, job, token, world)

    patch.setattr(saving, "_write", write)


@planted
def leftovers_stay(patch: pytest.MonkeyPatch) -> None:
    """Attempts of dead processes are never removed."""
    patch.setattr(Steps, "sweep", lambda *_: None)


@planted
def a_stale_lock(patch: pytest.MonkeyPatch) -> None:
    """The lock of a copy is a file, which a killed process leaves."""

    class FileLock:
        def __init__(self, path: Any) -> None:
            self._path = path

        def release(self) -> None:
            self._path.unlink()

    def try_lock(folder: Any) -> FileLock | None:
        path = folder.with_name(f"{folder.name}.lock")
        try:
            local.os.close(local.os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        return FileLock(path)

    patch.setattr(local, "try_lock", try_lock)


@planted
def ranks_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 commits without the files of the others."""
    patch.setattr(Leader, "gather", lambda _: {})


@planted
def a_full_disk_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """A write that fails is not noticed."""
    real = local.LocalSink.write

    def write(self: local.LocalSink, data: memoryview) -> None:
        try:
            real(self, data)
        except OSError as problem:
            if problem.errno != errno.ENOSPC:
                raise

    patch.setattr(local.LocalSink, "write", write)


@planted
def a_short_write(patch: pytest.MonkeyPatch) -> None:
    """The number of bytes that were written is not looked at."""
    patch.setattr(local.LocalSink, "write", lambda self, data: local.os.write(self._fd, data) and None)


@planted
def a_ledger_that_misses_a_step(patch: pytest.MonkeyPatch) -> None:
    """The first step of a pass that was resumed is not recorded."""
    real = Ledger.begin

    class Late:
        """Counters of a pass that are one step behind."""

        def __init__(self, counters: Any) -> None:
            self._counters = counters

        def __iter__(self) -> Any:
            return iter(self._counters)

        def __getitem__(self, number: int) -> int:
            return int(self._counters[number])

        def __setitem__(self, number: int, value: int) -> None:
            self._counters[number] = max(0, value - 1) if number == Count.STEPS else value

    def begin(self: Ledger, *arguments: Any, load: bool = False, **options: Any) -> None:
        real(self, *arguments, load=load, **options)
        if self._how == "loaded" and not load:
            self.counters = Late(self.counters)

    patch.setattr(Ledger, "begin", begin)


@planted
def a_ledger_without_loads(patch: pytest.MonkeyPatch) -> None:
    """A state that is loaded is not recorded."""
    real = Ledger.begin

    def begin(self: Ledger, *arguments: Any, load: bool = False, **options: Any) -> None:
        if load:
            self._how = "loaded"
        else:
            real(self, *arguments, **options)

    patch.setattr(Ledger, "begin", begin)


@planted
def a_save_in_the_background_of_values_that_change(patch: pytest.MonkeyPatch) -> None:
    """The thread writes the arrays of the model itself, which trains on meanwhile."""
    patch.setattr(background.Snapshots, "copy", lambda self, parts: (parts, {}))


@planted
def an_error_in_the_background_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The next call does not raise it, so that the run believes its checkpoint."""
    real = background.Background.finish

    def finish(self: background.Background) -> None:
        real(self)

    patch.setattr(background.Background, "finish", finish)


@planted
def an_answer_of_the_store_counts_as_failure(patch: pytest.MonkeyPatch) -> None:
    """The files of an attempt are removed although it became the step: an answer was lost, or a later request failed."""

    def commit(self: Steps, token: str, new: manifest.Manifest) -> manifest.Manifest:
        place = self.store.commit(new.step, token, manifest.to_bytes(new))
        self.store.release(new.step, token)
        self.sweep(new.step)
        return replace(new, place=place)

    def abandon(self: Steps, step: int, token: str) -> None:
        names = self.store.list(self.store.attempt(step, token))
        self.store.delete([name for name in names if not name.endswith(manifest.NAME)])
        self.store.release(step, token)

    patch.setattr(Steps, "commit", commit)
    patch.setattr(Steps, "abandon", abandon)


@planted
def a_forgetful_start_removes_the_steps_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager.PipelineCheckpoint, "_refuse_forgotten", lambda *_: None)


@planted
def units_acknowledged_early_come_again(patch: pytest.MonkeyPatch) -> None:
    """Units that are done ahead of a cursor are not left out."""
    patch.setattr(LaneCursor, "done", property(lambda _: EMPTY))


@planted
def batches_of_the_pass_before(patch: pytest.MonkeyPatch) -> None:
    """Workers continue with the plan of a pass that was left, and what they made is delivered in the next one."""
    real = workers.WorkerPool.begin

    def begin(self: workers.WorkerPool, plan: Any) -> workers.WorkerBatches:
        self._run -= 1
        return real(self, plan)

    patch.setattr(workers.WorkerPool, "begin", begin)


@planted
def rows_made_before_they_were_excluded(patch: pytest.MonkeyPatch) -> None:
    """What workers have made ahead of an exclusion is delivered."""
    patch.setattr(workers.BundlePool, "_drop_stale", lambda *_: None)


@planted
def a_worker_gets_no_room(patch: pytest.MonkeyPatch) -> None:
    """It waits for room, and the loader for its batch."""
    patch.setattr(workers.WorkerPool, "_grant", lambda *_: None)


SOON = {
    "a state one row ahead": 2,
    "a lane one output back": 1,
    "an excluded row is forgotten": 39,
    "weights are forgotten": 11,
    "a lost sync of a file": 12,
    "a lost sync of the folder": 12,
    "a swapped rename": 12,
    "a replaced step is removed first": 8,
    "leftovers stay": 1,
    "a stale lock": 10,
    "a ledger that misses a step": 2,
    "an early acknowledgement is forgotten": 63,
    "units acknowledged early come again": 19,
    "the same epoch again": 7,
    "a save in the background of values that change": 96,
    "an error in the background is forgotten": 74,
    "an answer of the store counts as failure": 243,
    "a forgetful start removes the steps of the one before": 8,
    "batches of the pass before": 66,
    "rows made before they were excluded": 177,
    "a worker gets no room": 149,
}
"""A seed that finds each bug, tried before the others: most need several histories. Another draw of plans changes it."""

RARE = (
    "a state of what was asked for",
    "a full disk is ignored",
)
"""Those that need a fault at one of a few moments."""
