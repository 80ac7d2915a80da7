"""Transforms of rows between the file and the model: columns, maps, filters, packing, formats.

Every transform is a function of its rows, and of a generator made from seed, epoch and row if a map uses one. It has no
state to save.
"""

from dataclasses import replace

from midepoch.transforms.batch import Batch, join
from midepoch.transforms.columns import Cast, ColumnStep, RemoveColumns, RenameColumns, SelectColumns
from midepoch.transforms.filter import FilterExpression, FilterRows
from midepoch.transforms.formats import Allocate, finish, present, present_rows
from midepoch.transforms.function import Function, RunContext
from midepoch.transforms.map import FlatMap, Map, Unbatch
from midepoch.transforms.media import Decode

Step = ColumnStep | Map | FilterRows | FilterExpression | FlatMap | Unbatch | Cast | Decode

__all__ = [
    "Batch",
    "Cast",
    "ColumnStep",
    "Decode",
    "FilterExpression",
    "FilterRows",
    "FlatMap",
    "Function",
    "Map",
    "RemoveColumns",
    "RenameColumns",
    "RunContext",
    "SelectColumns",
    "Step",
    "Unbatch",
    "finish",
    "join",
    "present",
    "present_rows",
    "run_steps",
]


def run_steps(steps: tuple[Step, ...], batch: Batch, run: RunContext, collect: Allocate | None = None) -> Batch:
    """Run all steps in turn, while there are rows: a batch without rows may have any columns.

    ``collect``: where the last function puts arrays of its rows.
    """
    last = max((i for i, step in enumerate(steps) if not isinstance(step, ColumnStep)), default=-1)
    for i, step in enumerate(steps):
        if not len(batch):
            break
        batch = step.apply(batch, replace(run, collect=collect) if collect and i == last else run)
    return batch
