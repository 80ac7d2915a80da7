"""Reinforcement learning with rollout processes: every prompt is trained on once, or rejected once, over kills.

Prompts are leased. Workers generate a group of completions for each, and reject a prompt if all rewards of its group
are equal, because it would teach nothing (dynamic filtering). The learner collects groups, makes a step of GRPO, and
then acknowledges their prompts. A checkpoint holds the model and the prompts that were acknowledged or rejected until
then. Prompts that were on their way when the learner or a worker was killed, and only those, are delivered again.

python examples/rollouts.py run --die-at 12        # killed in the step after that, with prompts on their way
python examples/rollouts.py run --workers 3        # resumes from step 10, with another number of workers
midepoch audit run/ledger                          # each prompt was acknowledged once
"""

import argparse
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.loader.leases import Lease

PROMPTS, GROUP, GROUPS, DEPTH, EVERY, DIGITS, WIDTH = 400, 8, 8, 4, 5, 10, 16


class Group(NamedTuple):
    """Completions of one prompt, with the probabilities under the policy that generated them."""

    completions: np.ndarray
    probabilities: np.ndarray
    rewards: np.ndarray


@dataclass
class Worker:
    """A rollout process, and the prompts it has been sent and not answered."""

    process: BaseProcess
    pipe: Connection
    tasks: dict[int, Lease] = field(default_factory=dict)


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        left, right = np.random.default_rng(0).integers(DIGITS, size=(2, PROMPTS))
        pq.write_table(pa.table({"prompt": np.arange(PROMPTS), "left": left, "right": right}), path)


def generate(pipe: Connection, log: Path) -> None:
    """Answer prompts with groups of completions, until the learner is gone."""
    rng = np.random.default_rng()
    with suppress(EOFError, ConnectionError), open(log, "a", buffering=1) as rejected:
        while True:
            lease, prompt, (left, right, out) = pipe.recv()
            logits = np.tanh(left[prompt["left"]] + right[prompt["right"]]) @ out
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            completions = rng.choice(DIGITS, size=GROUP, p=chances)
            rewards = (completions == (prompt["left"] + prompt["right"]) % DIGITS).astype(np.float32)
            if rewards.min() == rewards.max():
                print(prompt["prompt"], file=rejected)
                lease.reject()  # from this process: it is in every state that is saved from now on
                pipe.send((lease.id, None))
            else:
                pipe.send((lease.id, (completions, chances[completions], rewards)))


def train(folder: Path, workers: int, die_at: int | None) -> None:
    import torch  # here, because workers do without

    make_data(folder / "prompts.parquet")
    torch.manual_seed(0)
    sizes = {"left": (DIGITS, WIDTH), "right": (DIGITS, WIDTH), "out": (WIDTH, DIGITS)}
    model = torch.nn.ParameterDict({name: torch.randn(size) / 4 for name, size in sizes.items()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    ds = midepoch.from_files(folder / "prompts.parquet").shuffle(seed=42)
    loader = ds.loader(1, collate_fn=only_row, audit=folder / "ledger")
    trained: dict[str, int] = {"prompts": 0}
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=2)
    step = checkpoint.restore_latest(loader, model, optimizer, extra={"trained": trained}) or 0
    log = open(folder / "trained.txt", "a", buffering=1)  # noqa: SIM115
    print("from", step, file=log)

    def update(groups: list[tuple[Lease, Group]]) -> None:
        """Make a step of GRPO: advantages within each group, clipped ratios to the policy that generated it."""
        nonlocal step
        prompts = {name: torch.tensor([lease.batch[name] for lease, _ in groups]) for name in ("left", "right")}
        completions, before, rewards = (
            torch.tensor(np.stack(part)) for part in zip(*(g for _, g in groups), strict=True)
        )
        advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        hidden = torch.tanh(model["left"][prompts["left"]] + model["right"][prompts["right"]])
        now = torch.softmax(hidden @ model["out"], dim=1).gather(1, completions)
        ratio = now / before
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        if step == die_at:
            signal.raise_signal(signal.SIGKILL)
        optimizer.step()
        step += 1
        print("step", step, *(lease.batch["prompt"] for lease, _ in groups), file=log)
        for lease, _ in groups:
            lease.ack()
        trained["prompts"] += len(groups)

    def save() -> None:
        checkpoint.save(loader, model, optimizer, step=step, extra={"trained": trained})

    crew = start(workers, folder)
    while loader.epoch == 0:
        with loader.lease() as leases:  # a second time only if a worker has died: its prompts are delivered again
            answers = rollouts(leases, model, crew)
            while ready := list(islice(answers, GROUPS)):
                update(ready)
                if step % EVERY == 0:
                    save()
    save()
    print(f"{PROMPTS} prompts: {trained['prompts']} trained on, {PROMPTS - trained['prompts']} rejected")


def rollouts(leases: Iterator[Lease], model: Any, workers: list[Worker]) -> Iterator[tuple[Lease, Group]]:
    """Keep all workers busy, and yield groups that were not rejected, in the order in which they are complete."""
    while True:
        weights = tuple(model[name].detach().numpy() for name in ("left", "right", "out"))
        for worker in workers:
            while len(worker.tasks) < DEPTH and (lease := next(leases, None)) is not None:
                worker.tasks[lease.id] = lease
                with suppress(ConnectionError):  # it has died, which is noticed below
                    worker.pipe.send((lease, lease.batch, weights))
        if not any(worker.tasks for worker in workers):
            return
        for pipe in wait([worker.pipe for worker in workers]):
            worker = next(each for each in workers if each.pipe is pipe)
            try:
                number, answer = worker.pipe.recv()
            except (EOFError, ConnectionError):
                workers.remove(worker)
                if not workers:
                    raise RuntimeError("all workers have died") from None
                continue
            lease = worker.tasks.pop(number)
            if answer is not None:
                yield lease, Group(*answer)


def start(count: int, folder: Path) -> list[Worker]:
    context, workers = get_context("spawn"), []
    for number in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=generate, args=(theirs, folder / f"rejected-{number}.txt"), daemon=True)
        process.start()
        theirs.close()  # so that each side notices when the other has ended
        workers.append(Worker(process, ours))
    return workers


def only_row(rows: list[Any]) -> Any:
    return rows[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--die-at", type=int, help="be killed in the step after this one")
    options = parser.parse_args()
    train(options.folder, options.workers, options.die_at)
