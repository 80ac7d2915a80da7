"""Drawing of histories: a pipeline with features, and starts of a run with faults, all from a seed."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, replace
from typing import Any

from compositions import DRAWN, PIPELINES, REORDERED, ROWS, Case
from midepoch.checkpoint import Keep
from midepoch.loader.options import FEATURES, MEANINGLESS
from simulation.cluster import Fault

SIMULATED = [name for name in FEATURES if name not in ("micro-batches", "device")]
"""Devices need threads, and micro-batches are cut after delivery."""
IN_ROWS = ("rows", "drawn", "fixed", "filter", "window")
"""Pipelines whose outputs are rows with numbers of their own."""


@dataclass(frozen=True)
class Exit:
    """End of a start after a step: a rank is killed, or all save and exit, or all exit."""

    kind: str
    step: int
    rank: int = 0


@dataclass(frozen=True)
class Lag:
    """Seconds by which a rank comes late to a save, or to its next batch."""

    rank: int
    step: int
    seconds: float
    where: str


@dataclass(frozen=True)
class StartPlan:
    """One start of the run: its ranks, batches, checkpoints and faults.

    ``tolerant``: training continues after a checkpoint that could not be saved. ``connected``: ranks share a key-value
    store. ``older``: the checkpoint that is restored, as a share of those that are there, or None for the latest.
    ``looks``: a batch is taken as a sample before training, and ``set_epoch`` called. ``chooses``: ``set_epoch`` is called
    before each pass, as many loops do. ``rots``: before it, a bit of a
    file of the latest checkpoint has changed, at this share of its bytes. ``drifts``: at its second save, one rank has
    taken a batch more than the others. ``foolish``: then the next start loads the state of that rank: rows are lost.
    ``forgets``: it restores nothing, and trains from the beginning. ``workers``: of each rank. ``pauses``: batches are
    taken by ``next(loader)``, and it is closed in between; blocks of leases are left in between. ``returns``: after this
    step, the living process restores the latest checkpoint, as a loop does whose loss is not a number. ``saves_first``:
    what was restored is saved before the first batch. ``lag``: a rank is late once. ``probes``: states are loaded into
    another loader, which has to be at the same place. ``pipeline``: another than that of the plan, with which the run
    continues. ``eager``: a rank that has finished an epoch takes a lease of the next one while others have some of this.
    """

    world: int
    size: int
    every: int
    faults: tuple[Fault, ...] = ()
    exit: Exit | None = None
    tolerant: bool = True
    connected: bool = False
    older: float | None = None
    looks: bool = False
    chooses: bool = False
    rots: float | None = None
    drifts: bool = False
    foolish: bool = False
    forgets: bool = False
    workers: int = 0
    pauses: bool = False
    returns: int | None = None
    saves_first: bool = False
    lag: Lag | None = None
    probes: bool = False
    window: int = 10
    """Of batches by tokens."""
    pipeline: str = ""
    eager: bool = False


@dataclass(frozen=True)
class Plan:
    """A history. Its schedule is drawn from the seed while it runs."""

    seed: int
    features: tuple[str, ...]
    pipeline: str
    starts: tuple[StartPlan, ...]
    last: str
    remote: bool
    keep: int | Keep | None
    epochs: int
    edit_at: int
    has_model: bool = False
    in_background: bool = False
    """Checkpoints are saved by a thread."""
    has_generators: bool = False
    """Each rank saves its random generators, in a file of its own."""
    format: str | None = "numpy"

    @property
    def case(self) -> Case:
        return Case(self.features, self.pipeline, self.format)

    @property
    def in_lanes(self) -> bool:
        return self.case.pipeline not in ("rows", *DRAWN) or bool(
            {"schedule", "tokens at run time"} & set(self.features)
        )

    @property
    def changes(self) -> bool:
        """True if the run continues with another pipeline."""
        return any(start.pipeline for start in self.starts)

    @property
    def fixed(self) -> bool:
        """True if all starts have the same ranks and batches: then every batch is that of an uninterrupted run."""
        shapes = {(one.world, one.size) for one in self.starts}
        same = len(shapes) == 1 and all(one.window == 10 for one in self.starts) and not self.changes
        return same and "lease" not in self.features

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.pipeline} with {', '.join(self.features) or 'no feature'}, last_batch="
            f"{self.last!r}, {self.epochs} epochs, checkpoints {'in a store' if self.remote else 'on disk'}"
            f"{' in the background' * self.in_background}{' with generators' * self.has_generators}, keep={self.keep}, "
            f"format {self.format}, edited after step {self.edit_at}"
        ]
        for number, start in enumerate(self.starts):
            parts = [f"  start {number}: {start.world} ranks, batches of {start.size}, saves every {start.every} steps"]
            habits = {
                "goes back to an older checkpoint": start.older is not None,
                "restores nothing": start.forgets,
                "takes a sample": start.looks,
                "calls set_epoch": start.chooses,
                "a bit of the latest checkpoint has changed": start.rots is not None,
                "a rank takes a batch more": start.drifts,
                f"{start.workers} workers": start.workers > 0,
                "pauses": start.pauses,
                f"restores in the same process after step {start.returns}": start.returns is not None,
                "saves first": start.saves_first,
                "loads its states elsewhere": start.probes,
                f"windows of {start.window} rows": start.window != 10,
                start.pipeline: start.pipeline != "",
                "leases of the next epoch": start.eager,
                str(start.lag): start.lag is not None,
            }
            parts += [text for text, has in habits.items() if has]
            parts += [str(fault) for fault in start.faults] + ([str(start.exit)] if start.exit else [])
            lines.append("; ".join(parts))
        return "\n".join(lines)


def draw(seed: int) -> Plan:
    """Draw a history."""
    draws = random.Random(seed)
    pipeline = draws.choice(list(PIPELINES))
    features = _features(draws, pipeline)
    has = set(features).__contains__
    if has("set_weights"):
        pipeline = "window" if has("schedule") and pipeline == "window" else "mix"
    connected = draws.random() < 0.4
    elastic = draws.random() < 0.6 and not (has("schedule") or has("set_weights") or has("exclude steps"))
    elastic = elastic and not (has("exclude rows") and pipeline not in IN_ROWS)
    worlds = (1, 2) if has("schedule") else (1, 1, 1, 2, 2, 3)
    shape = _shape(draws, worlds)
    starts = []
    remote = draws.random() < 0.3
    for _ in range(draws.choice((1, 1, 2, 2, 3))):
        if elastic:
            shape = _shape(draws, worlds)
        starts.append(_start(draws, *shape, connected, remote))
    if elastic:
        shape = _shape(draws, worlds)
    starts.append(StartPlan(*shape, every=draws.choice((3, 4, 5)), connected=connected))
    several = max(start.world for start in starts) > 1
    lasts = ["uneven", "uneven", "drop", "pad"] if connected or not several else ["uneven"]
    last = draws.choice(lasts)
    if has("schedule") and has("set_weights") and has("tokens at run time"):
        features = tuple(name for name in features if name != "set_weights")  # is refused in the middle of a window
    if has("steps_per_epoch") and several:
        last = "drop" if last == "uneven" else last
        starts = [StartPlan(**{**vars(start), "connected": True}) for start in starts]
    keep, epochs = draws.choice((None, 1, 2)), draws.choice((1, 1, 1, 1, 2))
    # Leases of several ranks can be edited before the first one only, and an epoch may have two steps.
    edit_at = 0 if has("lease") or has("exclude steps") else draws.choice((0, 1, 2))
    plan = Plan(seed, features, pipeline, tuple(starts), last, remote, keep, epochs, edit_at)
    return _with_habits(plan, random.Random(f"habits of {seed}"))


def _with_habits(plan: Plan, draws: random.Random) -> Plan:
    """Draw what else users and disks do."""
    has, simple = set(plan.features).__contains__, not plan.in_lanes and "lease" not in plan.features
    pipeline, keep, starts = plan.pipeline, plan.keep, []
    if pipeline == "rows" and not plan.features and draws.random() < 0.5:
        pipeline, plan = "drawn", replace(plan, epochs=2)
    elif pipeline == "pack" and not plan.features and plan.fixed and draws.random() < 0.5:
        pipeline = "phases"
    if draws.random() < 0.3:
        keep = Keep(last=1, every=draws.choice((2, 3)))
    torn = False
    for number, start in enumerate(plan.starts):
        older = draws.random() if draws.random() < 0.25 else None
        looks = draws.random() < 0.1 and not (has("lease") or has("steps_per_epoch"))
        rots = draws.random() if draws.random() < 0.1 and number and not plan.remote else None
        drifts = draws.random() < 0.2 and simple and start.world > 1 and number < len(plan.starts) - 1
        torn = draws.random() < (0.5 if torn else 0.15) and not plan.remote and number < len(plan.starts) - 1
        if torn:
            start = replace(start, faults=_at_commits(draws, start))
        foolish = drifts and draws.random() < 0.3 and not plan.features
        starts.append(replace(start, older=older, looks=looks, rots=rots, drifts=drifts, foolish=foolish))
    if len({start.world for start in starts}) > 1 and draws.random() < 0.2 and not has("schedule"):
        starts[0] = replace(starts[0], world=4, size=1)
    rots = any(start.rots is not None for start in starts)
    has_model = rots or draws.random() < 0.1
    later = draws.random() < 0.1
    if not (has("lease") or has("steps_per_epoch")):
        starts = [replace(start, chooses=draws.random() < 0.3) for start in starts]
    number = draws.randrange(4)
    if 0 < number < len(starts) and draws.random() < 0.4 and not starts[number - 1].foolish:
        starts[number] = replace(starts[number], forgets=True)
    if draws.random() < 0.15:
        starts = [_with_workers(draws, start, is_last=start is starts[-1]) for start in starts]
    if draws.random() < 0.15:
        starts = [replace(start, pauses=start.world == 1 and not start.chooses) for start in starts]
    plan = replace(
        plan, pipeline=pipeline, keep=keep, starts=tuple(starts), has_model=has_model or later, in_background=later
    )
    return _with_rare_habits(plan, random.Random(f"rare habits of {plan.seed}"))


def _with_rare_habits(plan: Plan, draws: random.Random) -> Plan:
    """Draw what a few users do."""
    starts = list(plan.starts)
    if draws.random() < 0.25:
        starts = [
            start if start.forgets or start.foolish else replace(start, returns=draws.choice((None, 1, 2, 3, 5)))
            for start in starts
        ]
    if draws.random() < 0.25:
        starts = [replace(start, saves_first=draws.random() < 0.5) for start in starts]
    if draws.random() < 0.25:
        starts = [
            replace(start, lag=_lag(draws, start, late=number < len(starts) - 1)) for number, start in enumerate(starts)
        ]
    if draws.random() < 0.1:
        starts = [replace(start, probes="lease" not in plan.features) for start in starts]
    if draws.random() < 0.25:
        for number, start in enumerate(starts[1:-1], 1):
            unreadable = Fault(
                "error", draws.randrange(start.world), draws.randint(1, 30), "checkpoint", errno.EIO, reads=True
            )
            if not plan.remote:
                starts[number] = replace(start, faults=(*start.faults, unreadable))
    if "tokens, planned" in plan.features and draws.random() < 0.5:
        starts = [replace(start, window=draws.choice((4, 7, 10))) for start in starts]
    alone = "lease" in plan.features and all(start.world == 1 for start in starts)
    late = alone and "exclude steps" not in plan.features and draws.random() < 0.5
    plan = replace(plan, starts=tuple(starts), edit_at=draws.choice((1, 2, 3)) if late else plan.edit_at)
    return _with_more(plan, random.Random(f"more habits of {plan.seed}"))


def _with_more(plan: Plan, draws: random.Random) -> Plan:
    """Draw what was added later, so that a seed keeps the rest of its history."""
    if plan.fixed and not plan.features and draws.random() < 0.5:
        if plan.pipeline == "mix":
            plan = replace(plan, features=("exclude rows",))
        elif plan.pipeline in ("filter", "window") and plan.starts[0].world < 3:
            features, edit_at = ("schedule", "set_weights"), draws.choice((1, 3, 4, 5, 5))
            plan = replace(plan, pipeline="window", features=features, edit_at=edit_at)
    if plan.pipeline == "rows" and not plan.features and draws.random() < 0.5:
        calm = {"chooses": False, "looks": False, "drifts": False, "foolish": False, "probes": False}
        leasing = tuple(replace(start, **calm) for start in plan.starts)
        plan = replace(plan, features=("lease",), starts=leasing, edit_at=0)
    has, starts = set(plan.features).__contains__, list(plan.starts)
    if has("provenance") and draws.random() < 0.5:
        plan = replace(plan, format=None)
        if not any(frozenset({"sizes by step", other}) in MEANINGLESS for other in plan.features):
            plan = replace(plan, features=tuple(sorted({*plan.features, "sizes by step"})))
    if any(start.rots is not None for start in starts) and draws.random() < 0.5:
        plan = replace(plan, has_generators=True)
    if has("lease") and draws.random() < 0.6:
        starts = [_eager(draws, start, is_last=start is starts[-1]) for start in starts]
    restores = not any(start.forgets for start in starts)  # else the ledger takes it for another run
    together = plan.last != "uneven" or all(start.world == 1 for start in starts)  # ranks come to the end together
    may_change = restores and together and not _FIXED_MIX.intersection(plan.features)
    if plan.pipeline == "mix" and may_change and draws.random() < 0.5:
        plan = replace(plan, edit_at=0)
        starts = [replace(start, pipeline=draws.choice(("", REORDERED))) for start in starts]
    if plan.pipeline == "rows" and not any("tokens" in name for name in plan.features) and draws.random() < 0.4:
        plan = replace(plan, pipeline="fixed")
    return replace(plan, starts=tuple(starts))


def _eager(draws: random.Random, start: StartPlan, *, is_last: bool) -> StartPlan:
    """Draw a start that may end when some ranks lease the next epoch."""
    steps = ROWS // (start.world * start.size) + draws.choice((-1, 0, 0, 1, 2))
    start = replace(start, eager=start.world > 1)
    if is_last or not start.eager or draws.random() < 0.5:
        return start
    return replace(start, every=1, exit=Exit("kill", max(1, steps), draws.randrange(start.world)), faults=())


_FIXED_MIX = {"lease", "provenance", "exclude steps", "set_weights", "schedule", "tokens at run time"}
"""Features with which a mix cannot change, or not in the middle of a window. Provenance numbers its sources."""


def _lag(draws: random.Random, start: StartPlan, *, late: bool) -> Lag:
    """Draw a lag. ``late``: it may be later than the others wait for a save."""
    where = draws.choice(("save", "batch"))
    seconds = draws.choice((2.0, 12.0, 12.0, 30.0) if late and where == "save" else (2.0, 12.0))
    return Lag(draws.randrange(start.world), draws.randint(0, 5), seconds, where)


def _with_workers(draws: random.Random, start: StartPlan, *, is_last: bool) -> StartPlan:
    """Draw the workers of each rank. One may die, or be late, by less or more than the loader waits."""
    start = replace(start, workers=draws.choice((0, 1, 2, 3)))
    if not start.workers or is_last or draws.random() < 0.5:
        return start
    late = Fault("worker", draws.randrange(start.world), draws.randint(1, 12), number=draws.choice((0, 0, 5, 50)))
    return replace(start, faults=(*start.faults, late))


def _at_commits(draws: random.Random, start: StartPlan) -> tuple[Fault, ...]:
    """Draw a death at a rename, or an error of a sync that is followed by a loss of power."""
    rank, at = draws.randrange(start.world), draws.randint(1, 8)
    if draws.random() < 0.5:
        return (Fault(draws.choice(("kill", "power")), rank, at, "checkpoint", verb="rename"),)
    error = Fault("error", rank, draws.randint(1, 30), "checkpoint", errno.EIO, verb="sync")
    return (error, Fault("power", rank, draws.randint(40, 200)))


def _shape(draws: random.Random, worlds: tuple[int, ...]) -> tuple[int, int]:
    """Draw a number of ranks and the rows of a batch: 2 to 9 rows in a step, so that an epoch has up to 12 steps."""
    world = draws.choice(worlds)
    return world, draws.choice((2, 3, 4) if world == 1 else (1, 2, 2, 3))


def _features(draws: random.Random, pipeline: str) -> tuple[str, ...]:
    chosen: list[str] = []
    for name in draws.sample(SIMULATED, draws.choice((0, 1, 1, 2, 2, 3))):
        if any(frozenset({name, other}) in MEANINGLESS for other in chosen):
            continue
        planned, tokens = name == "tokens, planned", "tokens" in name
        if (planned and pipeline != "rows") or (pipeline == "pack" and (tokens or name in _NOT_PACKED)):
            continue
        if "tokens, planned" in chosen and name in ("set_weights", "schedule"):
            continue
        chosen.append(name)
    return tuple(sorted(chosen))


_NOT_PACKED = ("schedule", "set_weights", "context_parallel", "collate_fn")
"""Features whose pipelines have no packed sequences, or that the generator does not form of them."""


def _start(draws: random.Random, world: int, size: int, connected: bool, remote: bool) -> StartPlan:
    """Draw a start with a fault, or that ends early.

    The clock goes back only if ranks are connected: else notes of dead processes differ from those of this start in
    their times alone.
    """
    faults: list[Fault] = []
    leaves = None
    if draws.random() < 0.3:
        leaves = Exit(draws.choice(("kill", "kill", "preempt", "exit")), draws.randint(1, 5), draws.randrange(world))
    while not faults and (leaves is None or draws.random() < 0.3):
        faults.append(_fault(draws, world, remote, connected))
        if draws.random() < 0.25:
            faults.append(_fault(draws, world, remote, connected))
    every = draws.choice((1, 2, 2, 3, 4))
    return StartPlan(world, size, every, tuple(faults), leaves, draws.random() < 0.7, connected)


def _fault(draws: random.Random, world: int, remote: bool, connected: bool) -> Fault:
    rank, at = draws.randrange(world), int(2 ** (draws.random() * 7))
    kind = draws.choice(("kill", "kill", "power", "interrupt", "interrupt", "error", "error", "jump", "store"))
    where: str = draws.choice(("", "", "checkpoint", "ledger"))
    kind = "store" if remote and draws.random() < 0.3 else "kill" if kind == "store" and not remote else kind
    if kind == "jump":
        return Fault(kind, rank, at, number=draws.choice((3_600, 100_000, *((-60, -100_000) * connected))))
    if kind == "store" or (remote and kind == "error" and where == "checkpoint"):
        kind, where = draws.choice(("throttle", "lost answer", "lost answer", "twice", "slow")), "store"
        return Fault(kind, rank, at, where, count=draws.choice((1, 1, 2, 10**9)))
    if kind == "error":
        number: Any = draws.choice((errno.ENOSPC, errno.ENOSPC, errno.EIO))
        count = draws.choice((1, 1, 3, 10**9))
        return Fault(kind, rank, at, where, number, count, reads=number == errno.EIO and draws.random() < 0.5)
    return Fault(kind, rank, at, "store" if remote and where == "checkpoint" else where)
