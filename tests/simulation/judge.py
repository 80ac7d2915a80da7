"""Rules that hold after a history: by the log of delivered outputs, by the ledger, and by the files that are left."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from midepoch.audit import read_run
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.errors import MidepochError
from simulation.history import EDITS, Entry, FindingError, History, as_uninterrupted, uninterrupted
from simulation.plans import IN_ROWS

_LEFT = re.compile(r"\.step_.*\.(saving|old)\Z")


def judge(history: History) -> None:
    """Raise FindingError if a rule is broken."""
    if history.ahead is not None:
        _check_accused(history)
        return
    _check_log(history)
    _check_sizes(history)
    _check_ledger(history)
    _check_files(history)


def _check_log(history: History) -> None:
    plan = history.plan
    first = plan.starts[0]
    if plan.fixed:
        whole = uninterrupted(as_uninterrupted(plan, first.world, first.size, plan.features, plan.last), history.site)
        _compare(history.entries, whole)
        return
    plain = tuple(name for name in plan.features if name not in (*EDITS, "lease", "steps_per_epoch", "last_batch"))
    # A schedule has lanes of its own for each number of ranks, which is the same in all starts then.
    shape = (first.world, first.size) if "schedule" in plan.features else (1, 2)
    whole = uninterrupted(as_uninterrupted(plan, *shape, plain, "uneven"), history.site)
    seen, expected = _by_epoch(history.entries), _by_epoch(whole)
    for epoch in range(plan.epochs):
        found, full = seen.get(epoch, Counter()), expected[epoch]
        in_rows = plan.pipeline in IN_ROWS and "schedule" not in plan.features
        if "exclude rows" in plan.features:
            _check_excluded(history)
        changed = ("exclude rows" in plan.features and not in_rows) or plan.changes
        if "set_weights" in plan.features or changed:  # what comes depends on when it was changed
            continue
        if found - full:
            raise FindingError(f"epoch {epoch}: repeated {dict(found - full)}")
        lost = full - found
        if "exclude rows" in plan.features:
            lost = Counter({row: count for row, count in lost.items() if row not in _EXCLUDED})
        if "exclude steps" in plan.features and not epoch:
            continue
        if lost and plan.last != "drop":
            raise FindingError(f"epoch {epoch}: lost {dict(lost)}")
        if (
            lost
            and not plan.in_lanes
            and "exclude rows" not in plan.features
            and "tokens, planned" not in plan.features
        ):
            most = max(start.world * (3 if "sizes by step" in plan.features else start.size) for start in plan.starts)
            if sum(lost.values()) >= most:
                raise FindingError(f"epoch {epoch}: {sum(lost.values())} rows dropped, a global batch has {most}")


def _check_sizes(history: History) -> None:
    """With ``last_batch="drop"``, all batches are full."""
    plan, sizes = history.plan, {start.size for start in history.plan.starts}
    if plan.last != "drop" or len(sizes) > 1 or _OTHER_SIZES.intersection(plan.features):
        return
    for entry in history.entries:
        if len(entry.outputs) != next(iter(sizes)):
            raise FindingError(f"step {entry.step}, rank {entry.rank}: {len(entry.outputs)} outputs in a batch")


_OTHER_SIZES = {"tokens, planned", "tokens at run time", "sizes by step", "schedule"}


_EXCLUDED = {3, 9, 17}
_EXCLUDED_OF_MIX = {3, 9, 102}


def _check_excluded(history: History) -> None:
    plan = history.plan
    if plan.pipeline == "pack":  # whose outputs are tokens
        return
    of_mix = plan.case.pipeline == "mix" or "schedule" in plan.features
    begun = of_mix and plan.edit_at > 0  # outputs in progress keep their rows
    for entry in history.entries:
        late = entry.epoch > 0 or (entry.step > plan.edit_at and not begun)
        if late and (_EXCLUDED_OF_MIX if of_mix else _EXCLUDED) & set(entry.outputs):
            raise FindingError(f"step {entry.step} of epoch {entry.epoch} has an excluded row: {entry.outputs}")


def _compare(entries: tuple[Entry, ...], whole: tuple[Entry, ...]) -> None:
    found = {(entry.step, entry.rank): entry for entry in entries}
    if len(found) < len(entries):
        raise FindingError("a step was taken twice")
    expected = {(entry.step, entry.rank): entry for entry in whole}
    for key in sorted({*found, *expected}):
        if found.get(key) != expected.get(key):
            raise FindingError(f"step {key[0]}, rank {key[1]}: {found.get(key)} instead of {expected.get(key)}")


def _by_epoch(entries: tuple[Entry, ...]) -> dict[int, Counter[Any]]:
    found: dict[int, Counter[Any]] = {}
    for entry in entries:
        found.setdefault(entry.epoch, Counter()).update(entry.outputs)
    return found


def _check_ledger(history: History) -> None:
    plan = history.plan
    try:
        run = read_run(history.folder / "ledger")
        exact, epochs, problems = run.exact, run.epochs, run.problems
    except MidepochError as problem:
        if history.trusted:
            raise FindingError(f"the ledger cannot be read: {problem}") from problem
        return
    if not history.trusted:
        return
    if not exact or problems:
        raise FindingError(f"the ledger accuses a clean history: {problems} {epochs}")
    seen = _by_epoch(history.entries)
    for epoch in range(plan.epochs):
        proof = next((one for one in epochs if one.epoch == epoch), None)
        if proof is None or not proof.complete:
            raise FindingError(f"the ledger does not prove epoch {epoch}: {proof}")
        in_outputs = (
            plan.case.pipeline in IN_ROWS and plan.last != "drop" and not _OF_OUTPUTS.intersection(plan.features)
        )
        in_outputs = in_outputs and not {"exclude rows", "exclude steps"} <= {*plan.features}  # one may be both
        is_counted = not plan.in_lanes or in_outputs
        came = proof.once - proof.filtered - proof.excluded_outputs
        if is_counted and came != sum(seen[epoch].values()):
            raise FindingError(f"the ledger has {came} rows of epoch {epoch}, {sum(seen[epoch].values())} came")
    if plan.in_lanes or "lease" in plan.features:
        return
    if run.steps != len(history.steps):
        raise FindingError(f"the ledger has {run.steps} steps, there were {len(history.steps)}")
    draws, steps = history.cluster.random, sorted({entry.step for entry in history.entries})
    for step in draws.sample(steps, min(len(steps), _STEPS_ASKED)):
        named = sorted(one.row for one in run.rows_of_step(step))
        expected = sorted(row for entry in history.entries if entry.step == step for row in entry.outputs)
        if named != expected:
            raise FindingError(f"the ledger names the rows {named} of step {step}, {expected} came")


_STEPS_ASKED = 4
_OF_OUTPUTS = {"schedule", "tokens at run time"}
"""Features whose outputs are not rows: passes of a source, and batches."""


def _check_accused(history: History) -> None:
    """Rows of the other ranks may be lost, if a start loaded the state of a rank that was ahead."""
    plan = history.plan
    full = _by_epoch(uninterrupted(as_uninterrupted(plan, 1, 2, (), "uneven"), history.site))
    seen = _by_epoch(history.entries)
    lost = plan.last != "drop" and any(full[epoch] - seen.get(epoch, Counter()) for epoch in full)
    if lost and history.trusted and read_run(history.folder / "ledger").exact:
        raise FindingError("rows were lost, and the ledger says that the run is exact")


def _check_files(history: History) -> None:
    """The last start has saved, and removed what dead processes left."""
    if history.plan.remote:
        left = [name for name in history.bucket.content if name.endswith("/claim")]
    else:
        left = [path.name for path in (history.folder / "checkpoint").iterdir() if _LEFT.match(path.name)]
    if left and not history.plan.starts[-1].forgets:  # its saves may be refused, and only a save sweeps
        raise FindingError(f"left over: {left}")
    if history.rotten or history.disk.lost:
        return
    address = "sim://bucket/run" if history.plan.remote else history.folder / "checkpoint"
    saver = PipelineCheckpoint(address, rank=0, world_size=1)
    keep, saved = history.plan.keep, history.saved
    if isinstance(keep, int) and not history.plan.starts[-1].forgets and len(saver.steps()) < min(keep, len(saved)):
        raise FindingError(f"of the steps {saved}, {saver.steps()} are kept, with keep={keep}")
    for step in saver.steps():
        try:
            saver.verify(step)
        except MidepochError as problem:
            raise FindingError(f"step {step} is left damaged: {problem}") from problem
