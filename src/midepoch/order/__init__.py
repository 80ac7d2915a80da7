"""The order of rows: a position of an epoch in, a row id out.

PURE. Numpy and ``midepoch.errors`` only: no I/O, no pyarrow, no clock, no global state. Everything in this package is a
function of its arguments. A resume calls the same functions with the saved position.

    position ──lanes──► sequence index ──shuffle or draw──► chosen row ──selection──► row of the source

``Order`` is the frozen description. ``EpochOrder`` binds it to a layout of blocks and an epoch, with a few precomputed
arrays.
"""

from midepoch.order.bijection import Bijection
from midepoch.order.epoch import BlockUses, EpochOrder, Order, SourceLayout
from midepoch.order.selection import Selection, Shard, epoch_end
from midepoch.order.shuffle import SCOPES, Shuffle
from midepoch.order.weights import Weighted

__all__ = [
    "SCOPES",
    "Bijection",
    "BlockUses",
    "EpochOrder",
    "Order",
    "Selection",
    "Shard",
    "Shuffle",
    "SourceLayout",
    "Weighted",
    "epoch_end",
]
