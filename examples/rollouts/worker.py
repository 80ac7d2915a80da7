"""Rollouts in worker processes: for each leased prompt a group of completions, or its rejection.

``rollouts`` runs in the learner, all else in the workers.
"""

import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from multiprocessing import parent_process
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from midepoch import Lease

GROUP, DIGITS = 8, 10


class Group(NamedTuple):
    """Completions of one prompt, with the probabilities under the policy that generated them."""

    completions: np.ndarray
    probabilities: np.ndarray
    rewards: np.ndarray


def generate(lease: Lease, prompt: dict[str, Any], weights: dict[str, np.ndarray]) -> Group | None:
    """Return a group, or None for a prompt that is rejected because all rewards are equal (dynamic filtering).

    The prompt is "left + right, modulo 10", and a completion is one digit.
    """
    logits = np.tanh(weights["left"][prompt["left"]] + weights["right"][prompt["right"]]) @ weights["out"]
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    completions = np.random.default_rng().choice(DIGITS, size=GROUP, p=chances)
    rewards = (completions == (prompt["left"] + prompt["right"]) % DIGITS).astype(np.float32)
    if rewards.min() == rewards.max():
        lease.reject()  # from this process: it is in every state that is saved from now on
        return None
    return Group(completions, chances[completions], rewards)


def exit_with_learner() -> None:
    """Watch the learner. A worker of a pool would outlive one that was killed, and wait for prompts indefinitely."""
    learner = parent_process()
    assert learner is not None

    def watch() -> None:
        learner.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def rollouts(pool: Executor, leases: Iterator[Lease], model: Any, most: int) -> Iterator[tuple[Lease, Group]]:
    """Keep all workers busy, and yield groups that were not rejected, in the order in which they are complete."""
    out: dict[Future[Group | None], Lease] = {}
    while True:
        # A copy, because the pool pickles it in another thread, possibly during the next update.
        weights = {name: parameter.detach().numpy().copy() for name, parameter in model.items()}
        for lease in islice(leases, most - len(out)):
            out[pool.submit(generate, lease, lease.batch, weights)] = lease
        if not out:
            return
        for future in wait(out, return_when=FIRST_COMPLETED).done:
            lease, group = out.pop(future), future.result()
            if group is not None:
                yield lease, group
