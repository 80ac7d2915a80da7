"""The Spec: source, order and steps as one frozen value, and the identity that a state is checked against."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from midepoch.order import Cut, Order
from midepoch.sources import Source
from midepoch.transforms import Map, RenameColumns, Step

ON_ERROR = ("raise", "skip")


@dataclass(frozen=True, eq=False)
class Pipeline:
    """All that decides what stands at a position. Immutable, and it pickles small.

    ``seed_drawn``: the seed was not given by the user, so a resume takes over the one in the state; ``seed_agreed``:
    it is the same on all ranks all the same. ``lanes_given``: the number of lanes was, so a loader does not choose it;
    ``lanes_kept``: nor does it choose one for a state that was loaded.
    """

    source: Source
    order: Order
    steps: tuple[Step, ...] = ()
    cut: Cut = field(default_factory=Cut)
    format: str | None = None
    on_error: str = "raise"
    seed_drawn: bool = False
    seed_agreed: bool = False
    lanes_given: bool = False
    lanes_kept: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")

    @property
    def seed_alone(self) -> bool:
        """Whether the seed was drawn by this process alone."""
        return self.seed_drawn and not self.seed_agreed

    @property
    def rows(self) -> int:
        """Rows of an epoch, over all shards."""
        return len(self.order)

    @cached_property
    def head(self) -> dict[str, str]:
        """The columns that the steps before the first map leave: name -> name in the source. No other is ever read."""
        kept = {name: name for name in self.source.schema.names}
        for step in self.steps:
            if isinstance(step, Map):
                break
            names = step.columns(list(kept))
            sources = kept.values() if isinstance(step, RenameColumns) else (kept[name] for name in names)
            kept = dict(zip(names, sources, strict=True))
        return kept

    @cached_property
    def tail(self) -> tuple[Step, ...]:
        """The steps from the first map on."""
        first = next((i for i, step in enumerate(self.steps) if isinstance(step, Map)), len(self.steps))
        return self.steps[first:]

    @cached_property
    def known_columns(self) -> tuple[str, ...] | None:
        """The columns after all steps, or None where only running a map would tell."""
        return None if self.tail else tuple(self.head)

    @cached_property
    def group(self) -> int | None:
        """How many rows the first batched map is given at a time when rows are iterated one by one."""
        return next((step.batch_size for step in self.steps if isinstance(step, Map) and step.batched), None)

    @property
    def can_skip(self) -> bool:
        """Whether rows may be passed over, so that shards that hand out rows one by one drift apart."""
        return self.on_error == "skip" or any(isinstance(step, Map) and step.on_error == "skip" for step in self.steps)

    @property
    def has_map(self) -> bool:
        return any(isinstance(step, Map) for step in self.steps)

    @cached_property
    def text(self) -> str:
        """The steps in words, as far as a state depends on them: what a map *is*, not its code."""
        maps = ["map[batched]" if step.batched else "map" for step in self.steps if isinstance(step, Map)]
        return ",".join(maps) or "none"
