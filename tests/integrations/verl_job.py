"""examples/grpo_verl, which notes its prompts in FOLDER/prompts.txt, and may be killed within a step.

python verl_job.py FOLDER [STEP]: SIGKILL in the step after STEP, between its gradients and the update.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_verl"


def note_prompts(folder: Path, die_at: int | None) -> None:
    """Have the example note the step it resumes from, the prompts of each step, and prompts that are rejected."""
    import actor
    import prompts

    update, restore, step = actor.update, actor.restore, 0

    def note(*words: object) -> None:
        with open(folder / "prompts.txt", "a") as log:
            print(*words, file=log)

    def die() -> None:
        signal.raise_signal(signal.SIGKILL)

    def noted_restore(*rest: Any) -> int:
        nonlocal step
        step = restore(*rest)
        note("from", step)
        return step

    def noted_update(policy: Any, optimizer: Any, batch: Any) -> None:
        nonlocal step
        if step == die_at:
            optimizer.step = die
        update(policy, optimizer, batch)
        step += 1
        note("step", step, *sorted(set(batch.non_tensor_batch["number"])))

    class Prompts(prompts.Prompts):
        numbers: dict[str, str]

        def __iter__(self) -> Iterator[dict[str, Any]]:
            self.numbers = {}
            for batch in super().__iter__():
                self.numbers.update(zip(batch["uid"], batch["number"], strict=True))
                yield batch

        def ack(self, uids: Iterable[str], *, rejected: bool = False) -> None:
            if rejected:
                note("rejected", *sorted({self.numbers[uid] for uid in uids}))
            super().ack(uids, rejected=rejected)

    actor.update, actor.restore, prompts.Prompts = noted_update, noted_restore, Prompts


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLE))
    note_prompts(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    sys.argv = [str(EXAMPLE / "train.py"), sys.argv[1]]
    runpy.run_path(sys.argv[0], run_name="__main__")
