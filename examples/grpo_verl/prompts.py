"""A dataloader for the trainers of verl that loses no prompt between generation and update.

The trainers of verl take batches from ``train_dataloader``, generate ahead of the update, and save the state of the
dataloader in ``data.pt``. With a StatefulDataLoader that state is ahead of the model: prompts that were taken and not
trained on are lost at a resume. ``Prompts`` has the same interface, and a state that holds what was acknowledged.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
from verl.utils.dataset.rl_dataset import collate_fn

import midepoch


class Prompts:
    """Dataloader for verl, over leases: ``uid`` of each prompt is the number of its lease."""

    def __init__(self, data: midepoch.Dataset, batch_size: int, **options: Any) -> None:
        self.loader = data.loader(1, collate_fn=itemgetter(0), rank=0, world_size=1, **options)
        self._size = batch_size

    def __len__(self) -> int:
        return -(-len(self.loader) // self._size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.loader.lease() as leases:
            while prompts := list(islice(leases, self._size)):
                uids = np.array([str(lease.id) for lease in prompts], dtype=object)
                yield collate_fn([lease.batch for lease in prompts]) | {"uid": uids}

    def ack(self, uids: Iterable[str], *, rejected: bool = False) -> None:
        """Acknowledge prompts: after the update with their responses, or as rejected."""
        for uid in sorted(set(uids)):
            self.loader.ack(int(uid), rejected=rejected)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
