"""The recipe examples/automodel/recipe.yaml on the CPU. Ranks note the rows of each step.

python nemo_automodel_job.py FOLDER DIE_AT: SIGKILL after step DIE_AT, before its save.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import stacks.automodel_cpu  # noqa: F401

EXAMPLE = Path(__file__).parents[2] / "examples" / "automodel"


def main(folder: str, die_at: str) -> None:
    from nemo_automodel.components.config.loader import load_yaml_config

    from midepoch.integrations.nemo_automodel import ResumableFinetuneRecipe

    class Noted(ResumableFinetuneRecipe):
        def _run_train_optim_step(self, batches: Any, *arguments: Any) -> Any:
            rows = [row for batch in batches for row in batch["input_ids"][:, 0].tolist()]
            assert all((batch["labels"] == (batch["input_ids"] + 1) % 128).all() for batch in batches)
            done = super()._run_train_optim_step(batches, *arguments)
            step = self.step_scheduler.step + 1
            with open(f"{folder}/rows-{os.environ['RANK']}.txt", "a") as log:
                print(step, *rows, file=log)
            if step == int(die_at):
                dist.barrier()  # the others have noted this step: they are killed with the first
                signal.raise_signal(signal.SIGKILL)
            return done

    sys.path.insert(0, str(EXAMPLE))
    config = load_yaml_config(str(EXAMPLE / "recipe.yaml"))
    config.dataset.path = f"{folder}/data.parquet"
    config.checkpoint.checkpoint_dir = f"{folder}/checkpoints"
    config.dist_env.backend = "gloo"
    recipe = Noted(config)
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main(*sys.argv[1:])
