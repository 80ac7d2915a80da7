"""The spec of a pipeline: its tree, its lanes, the shard of this process, and its identity in a state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from midepoch._internal.progress import Timings
from midepoch.distributed.keyvalue import draw_global_seed
from midepoch.errors import CheckpointMismatchError
from midepoch.order import Order, Shard, Shuffle, Weighted
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor
from midepoch.pipeline.lanes import Lanes, Share
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Excluded, Mix, Node
from midepoch.pipeline.rows import Bundles, BundlesHere
from midepoch.sources import Source

DEFAULTS = {
    "selection": "",
    "scope": "none",
    "seed": None,
    "window": None,
    "aligned": False,
    "weights": "",
    "arguments": "",
}
"""Values that are omitted from the description of a part."""


def identity(spec: PipelineSpec) -> dict[str, Any]:
    """Return the fields with which a state of the pipeline is compared."""
    node = spec.node
    if isinstance(node.base, Leaf):
        fields = leaf_identity(node.base) | {"lanes": spec.lanes, "pipeline": node.text}
        if node.arguments or spec.numbered is None:
            fields["arguments"] = node.arguments
        return fields
    return {
        "data": node.digest,
        "rows": sum(leaf.rows for leaf in node.leaves),
        **{name: value for name, value in DEFAULTS.items() if name != "weights"},
        "lanes": spec.lanes,
        "pipeline": node.text,
        "arguments": node.arguments,
        "parts": describe(node),
    }


def leaf_identity(leaf: Leaf) -> dict[str, Any]:
    """Return the fields with which the rows of one source are compared."""
    shuffle = leaf.order.shuffle
    fields = {
        "data": leaf.source.fingerprint,
        "rows": leaf.rows,
        "selection": leaf.order.selection.text,
        "scope": shuffle.scope if shuffle else "none",
        "seed": shuffle.seed if shuffle else None,
        "window": shuffle.window if isinstance(shuffle, Shuffle) and shuffle.scope == "window" else None,
        "lanes": leaf.order.lanes,
        "aligned": isinstance(shuffle, Shuffle) and shuffle.aligned,
        "pipeline": leaf.text,
    }
    return fields | ({"weights": shuffle.digest} if isinstance(shuffle, Weighted) else {})


def describe(node: Node) -> dict[str, Any]:
    """Describe a node, as far as a state depends on it, as a tree of JSON-able dicts."""
    base = node.base
    if isinstance(base, Leaf):
        fields = leaf_identity(base) | {"pipeline": node.text, "arguments": node.arguments}
        return {name: value for name, value in fields.items() if name != "lanes" and value != DEFAULTS.get(name, ...)}
    more: dict[str, Any] = {}
    if isinstance(base, Mix):
        more = {"weights": list(base.weights)} | ({"names": list(base.names)} if base.names else {})
        more |= {"schedule": base.schedule.text} if base.schedule is not None else {}
        more |= {"learned": [*base.learned[:2], list(base.learned.weights)]} if base.learned is not None else {}
    more |= {"arguments": node.arguments} if node.arguments else {}
    return {"pipeline": node.text, **more, "parts": [describe(part) for part in base.parts]}


@dataclass(frozen=True, eq=False)
class PipelineSpec:
    """The definition of a dataset. Immutable.

    ``lanes_chosen``: the number of lanes was given, or adopted from a state, so a loader does not choose it.
    ``groups``: the number of interleaved sequences of positions, each of which is split into groups for batched
    functions; 0 before anything has run.
    """

    node: Node
    format: str | None = None
    shard: Shard = field(default_factory=Shard)
    lanes: int = 1
    lanes_chosen: bool = False
    groups: int = 0
    changes: tuple[str, ...] = ()
    """Fields allowed to differ from the run that saved a state, and changes of a mix, at all resumes so far."""
    epoch_outputs: int = 0
    """Outputs of the last epoch that was iterated to its end."""
    excluded: Excluded = ()
    """Rows that are not delivered."""
    origins: tuple[str, ...] = ()
    """The branches of the run in which the state was saved that was loaded, if a ledger recorded them."""
    global_seed: int | None = None
    """The seed of the global random generators while functions run, once it is drawn."""

    @staticmethod
    def of(leaf: Leaf) -> PipelineSpec:
        """Return the spec of the rows of one source."""
        return PipelineSpec(Node(leaf))

    @cached_property
    def numbered(self) -> int | None:
        """Rows of an epoch over all shards, if positions can be computed, as for ``len`` and indexing; else None."""
        return self.rows if self.node.has_positions else None

    @property
    def unit(self) -> str:
        """The unit that a cursor counts: "rows", or "outputs" if positions cannot be computed."""
        return "outputs" if self.numbered is None else "rows"

    @cached_property
    def excluded_texts(self) -> tuple[tuple[int, str], ...]:
        """The excluded rows as a state has them: the number of a source, and a text. They are encoded once."""
        return tuple((number, rows.encode()) for number, rows in enumerate(self.excluded) if rows)

    @property
    def base(self) -> Leaf:
        """The leaf, if there is only one. Raises TypeError if there are several."""
        if not isinstance(self.node.base, Leaf):
            raise TypeError(
                f"this dataset has several sources ({self.node.text}). Use the datasets that it was made from."
            )
        return self.node.base

    @property
    def source(self) -> Source:
        """The source, if there is only one. Raises TypeError if there are several."""
        return self.base.source

    @property
    def order(self) -> Order:
        """The order of the rows of the one source, with the lanes."""
        return replace(self.base.order, lanes=self.lanes)

    @property
    def rows(self) -> int:
        """Rows of an epoch, over all sources and shards."""
        return sum(leaf.rows for leaf in self.node.leaves)

    @property
    def files(self) -> int:
        """The number of files of all sources."""
        return sum(len(leaf.source.files) for leaf in self.node.leaves)

    @property
    def files_text(self) -> str:
        """The number of files as text. A folder of media is one entry of its index, and is called a folder."""
        noun = "folder" if all(leaf.source.is_folder for leaf in self.node.leaves) else "file"
        return f"{self.files:,} {noun}{'s' * (self.files != 1)}"

    @cached_property
    def leaf(self) -> Leaf:
        """The leaf as it is run, if positions can be computed."""
        order = replace(self.base.order, lanes=self.lanes)
        return replace(self.base, order=order, shard=self.shard, format=self.format, global_seed=self.global_seed)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves as they are run, each split into the lanes."""
        return tuple(
            replace(leaf, order=replace(leaf.order, lanes=self.lanes), global_seed=self.global_seed, path=path)
            for leaf, path in zip(self.node.leaves, self.node.paths(), strict=True)
        )

    def bundles_here(self, *, shared: bool, timings: Timings | None = None) -> BundlesHere:
        """Return the maker of bundles in this process, for lanes."""
        return BundlesHere(self.leaves, self.excluded, shared=shared, timings=timings)

    def undelivered(self, epoch: int, lane: LaneCursor) -> Intervals:
        """Return the positions after a cursor of rows that are not delivered, with those of excluded rows."""
        return lane.done.union(self.excluded_positions(epoch)).from_(lane.taken)

    def excluded_positions(self, epoch: int) -> Intervals:
        """Return the positions of the excluded rows in an epoch, if positions can be computed."""
        if not self.excluded:
            return EMPTY
        if epoch not in self._excluded_positions:
            order = self.order.at(epoch, self.source.layout)
            found = Intervals.from_positions(order.positions_of_rows(self.excluded[0].positions()))
            self._excluded_positions.clear()  # one epoch at a time
            self._excluded_positions[epoch] = found
        return self._excluded_positions[epoch]

    @cached_property
    def _excluded_positions(self) -> dict[int, Intervals]:
        return {}

    @property
    def seed_alone(self) -> bool:
        """True if this process alone has drawn a seed."""
        return any(leaf.seed_alone for leaf in self.node.leaves)

    @property
    def skips_rows(self) -> bool:
        """True if shards that iterate rows one by one drift apart, because each skips different rows."""
        return self.numbered is not None and self.shard.count > 1 and self.base.can_skip

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The fields with which a state is compared."""
        return identity(self)

    @property
    def state_is_global(self) -> bool:
        """True if the state of one process restores all processes. False if each runs lanes of its own."""
        if self.numbered is not None:
            return True
        return Share.of(self.for_processes(self.shard.count).lanes, self.shard).lanes.count == 1

    def seeded(self) -> PipelineSpec:
        """Return the spec with the seed of the global generators, drawn if necessary."""
        if self.global_seed is not None:
            return self
        what = self.node.digest if self.numbered is None else self.base.source.fingerprint
        return replace(self, global_seed=draw_global_seed(what))

    def for_processes(self, count: int, *, begun: bool = False) -> PipelineSpec:
        """Return the spec with which ``count`` processes begin, or continue if it has ``begun``.

        If positions cannot be computed, each process gets a lane, unless the number of lanes was chosen or rows are
        only copied; those of a run that has begun stay. Batched functions get groups of the rows of each process,
        unless a state has another number.
        """
        if self.numbered is not None:
            kept = self.groups and self.lanes_chosen  # adopted from a state
            return self if kept or self.base.group is None else replace(self, groups=count)
        if begun or self.lanes_chosen or self.node.plain or not self.node.cuts_alike:
            return self
        return replace(self, lanes=count)

    def open(self, process: Shard, bundles: Bundles, cursor: Cursor, *, traced: bool = False) -> Lanes:
        """Open the lanes of one process at a cursor. Raises CheckpointMismatchError if the cursor lacks them.

        ``traced``: packed sequences name their documents.
        """
        self.check_known(cursor, process)
        return Lanes(self.node, self.lanes, Share.of(self.lanes, process), bundles, cursor, traced=traced)

    def check_known(self, cursor: Cursor, process: Shard) -> None:
        """Raise CheckpointMismatchError if a cursor lacks lanes that a process needs."""
        if self.numbered is not None or not cursor.begun:
            return
        needed = Share.of(self.lanes, process).lanes.positions(0, self.lanes).tolist()
        if missing := [lane for lane in needed if lane not in cursor.lanes]:
            raise CheckpointMismatchError(
                "flow",
                f"the lanes {', '.join(map(str, sorted(cursor.lanes)[:2]))}, … of {self.lanes}",
                f"lane {missing[0]}, which this rank needs",
                "this is the state of one of several ranks, with the lanes of that rank only. Load the list of the "
                "states of all ranks (any number of ranks can resume from it), or save with PipelineCheckpoint, which "
                "does so",
            )
