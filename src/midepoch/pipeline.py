"""The Spec: source, order and steps as one frozen value, and the identity that a state is checked against."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from midepoch.order import Cut, Order
from midepoch.sources import Source
from midepoch.transforms import Map, RemoveColumns, RenameColumns, SelectColumns, Step

ON_ERROR = ("raise", "skip")


@dataclass(frozen=True, eq=False)
class Pipeline:
    """All that decides what stands at a position. Immutable, and it pickles small.

    ``seed_drawn``: the seed was not given by the user, so a resume takes over the one in the state.
    """

    source: Source
    order: Order
    steps: tuple[Step, ...] = ()
    cut: Cut = field(default_factory=Cut)
    format: str | None = None
    on_error: str = "raise"
    seed_drawn: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")

    @property
    def rows(self) -> int:
        """Rows of an epoch, over all shards."""
        return len(self.order)

    @cached_property
    def read_columns(self) -> tuple[str, ...]:
        """The columns of the source that the steps can see: the others are never read."""
        kept = {name: name for name in self.source.schema.names}  # present name -> name in the source
        for step in self.steps:
            if isinstance(step, RenameColumns):
                kept = dict(zip(step.columns(list(kept)), kept.values(), strict=True))
            elif isinstance(step, (SelectColumns, RemoveColumns)):
                kept = {name: kept[name] for name in step.columns(list(kept))}
            else:
                break
        wanted = set(kept.values())
        return tuple(name for name in self.source.schema.names if name in wanted)

    @cached_property
    def known_columns(self) -> tuple[str, ...] | None:
        """The columns after all steps, or None where only running a map would tell."""
        names = tuple(self.source.schema.names)
        for step in self.steps:
            if isinstance(step, Map):
                return None
            names = step.columns(names)
        return names

    @cached_property
    def group(self) -> int | None:
        """How many rows the first batched map is given at a time when rows are iterated one by one."""
        return next((step.batch_size for step in self.steps if isinstance(step, Map) and step.batched), None)

    @property
    def has_map(self) -> bool:
        return any(isinstance(step, Map) for step in self.steps)

    @cached_property
    def text(self) -> str:
        """The steps in words, as far as a state depends on them: what a map *is*, not its code."""
        maps = ["map[batched]" if step.batched else "map" for step in self.steps if isinstance(step, Map)]
        return ",".join(maps) or "none"
