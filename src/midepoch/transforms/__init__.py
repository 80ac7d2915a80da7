"""What happens to rows between the file and the model: columns, maps, formats.

Everything here is 1:1 and a function of the row (and, for a map that asks, of a generator made from seed, epoch and
row), so there is nothing to remember and nothing to save.
"""

from midepoch.transforms.batch import Batch
from midepoch.transforms.columns import RemoveColumns, RenameColumns, SelectColumns
from midepoch.transforms.formats import FORMATS, finish, present, present_rows
from midepoch.transforms.map import Map

Step = Map | SelectColumns | RemoveColumns | RenameColumns

__all__ = [
    "FORMATS",
    "Batch",
    "Map",
    "RemoveColumns",
    "RenameColumns",
    "SelectColumns",
    "Step",
    "finish",
    "present",
    "present_rows",
]
