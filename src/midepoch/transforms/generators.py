"""The global random generators (``random``, ``numpy.random``, torch's CPU generator) while functions of the user run.

They are seeded for the row of each call (for a batched function, the first row of its group), so that random values do
not depend on workers, chunks or the point of a resume. The caller's states are restored afterwards.

Seeding all three costs 9 µs, as much as two calls of a small function. Therefore a function that has drawn nothing in
its first calls is called without seeding. The states are compared afterwards. If it has drawn after all, those rows are
computed again, and it is seeded for every later call.

In worker threads the global generators belong to all threads. Draws from torch's are replaced there by draws from a
generator of the thread, with the same numbers. Functions that draw from the others are refused if
that is found before the threads start. Later it is a warning, since another thread may have drawn.
"""

from __future__ import annotations

import ctypes
import logging
import random
import sys
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from midepoch._internal.values import loaded
from midepoch.errors import MidepochError
from midepoch.order.bijection import derive

T = TypeVar("T")
_log = logging.getLogger("midepoch")
Int64Array = npt.NDArray[np.int64]

_TRIAL: Final = 16
"""Number of calls that are checked one by one."""
_DRAWS: Final = -1
_STATE_BYTES: Final = 625 * 4  # of an MT19937: 624 words and the index of the next one


class Seeds:
    """Seeds of the rows of one step in one epoch.

    ``watched``: calls that are checked one by one. ``generator``: that of a thread, in which torch's draws are replaced
    by draws from it. Nothing else is seeded there.
    """

    def __init__(self, key: npt.NDArray[np.uint64], watched: int = 0, generator: Any = None) -> None:
        self._key, self._watched, self._generator = key, watched, generator
        self._last: GeneratorStates | None = None
        self.calls = 0
        self.drew: frozenset[str] = frozenset()
        """The generators from which something was drawn, as far as it was checked."""

    def of(self, rows: Int64Array, ordinals: Int64Array | None) -> list[int]:
        """Return a 64-bit seed for each row. Rows made from the same row differ in their ordinals."""
        mixed = _scrambled(rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._key[0])
        if ordinals is not None:
            mixed = np.where(ordinals == 0, mixed, _scrambled(mixed ^ _scrambled(ordinals.astype(np.uint64))))
        seeds: list[int] = (_scrambled(mixed ^ self._key[1])).tolist()
        return seeds

    def set(self, seed: int) -> None:
        """Seed the generators for the next call."""
        if self._generator is not None:
            self._generator.manual_seed(seed >> 32)
            return
        self.look()
        self.calls += 1
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        if (torch := _torch_generator()) is not None:
            torch.manual_seed(seed >> 32)
        if self.calls <= self._watched and not self.drew:
            self._last = GeneratorStates(seeded=True)

    def look(self) -> None:
        """Record whether the last call has drawn anything, if it is checked."""
        if self._last is not None:
            self.drew |= self._last.drawn()
            self._last = None


class Generators:
    """Runner of one pipeline's functions. ``seed`` is the pipeline's, ``base`` follows the user's ``manual_seed``."""

    def __init__(
        self, seed: int = 0, base: int = 0, path: int = 0, *, drawing: Iterable[Hashable] | None = None
    ) -> None:
        self._seed, self._base, self._path = seed, base, path
        self._drawing = None if drawing is None else set(drawing)
        """In a worker thread: the functions that draw from torch's generator."""
        self.drew: dict[Hashable, frozenset[str]] = {}
        """The generators from which functions have drawn, as far as it was checked."""
        self._left: dict[Hashable, int] = {}  # calls of each function that remain to be checked, or _DRAWS

    def run(
        self, function: Hashable, where: tuple[str, int, int], action: Callable[[Seeds | None], T], *, repeatable: bool
    ) -> T:
        """Return the result of ``action``, which calls a function for some rows and seeds the generators before each.

        ``where`` is the purpose, number and epoch of the function. ``action(None)`` calls the function without seeding.
        If it is ``repeatable``, the action may be run a second time.
        """
        if self._drawing is not None:
            return self._run_in_thread(function, where, action, repeatable=repeatable)
        left, before = self._left.get(function, _TRIAL), GeneratorStates()
        if left == 0 and repeatable and before.is_complete:
            try:
                result = action(None)
            except BaseException as problem:
                if not before.drawn() or not isinstance(problem, Exception):
                    before.restore()
                    raise
            else:
                if not before.drawn():
                    return result
            before.restore()
            left = self._left[function] = _DRAWS
        try:
            seeds = Seeds(self._key(where), max(0, left))
            before.prepare()
            result = action(seeds)
            if before.torch is None and repeatable and _torch_generator() is not None:
                before.torch = _torch_state()  # the function has imported torch and may have drawn from it unseeded
                seeds = Seeds(self._key(where), max(0, left))
                result = action(seeds)
            seeds.look()
        finally:
            before.restore()
        if seeds.drew:
            self.drew[function] = self.drew.get(function, frozenset()) | seeds.drew
        if left != _DRAWS:
            self._left[function] = _DRAWS if seeds.drew else max(0, left - seeds.calls)
        return result

    def _run_in_thread(
        self, function: Hashable, where: tuple[str, int, int], action: Callable[[Seeds | None], T], *, repeatable: bool
    ) -> T:
        """Return the result of ``action``. Draws from torch's generator are replaced by draws of this thread's.

        Replacing them costs some time for every function of torch, and is only done for functions that draw.
        """
        before, drawing = GeneratorStates(), self._drawing
        assert drawing is not None
        if function not in drawing:
            result = action(None)
            drawn = before.drawn()
            self._warn_of(function, drawn)
            if "torch" not in drawn:
                return result
            drawing.add(function)
            if not repeatable:
                return result
            before = GeneratorStates()
        torch: Any = sys.modules["torch"]
        generator = torch.Generator()
        with _thread_mode()(generator):
            result = action(Seeds(self._key(where), generator=generator))
        self._warn_of(function, before.drawn())
        return result

    def _warn_of(self, function: Hashable, drawn: frozenset[str]) -> None:
        """Warn, once, that a function may have drawn from a generator that all threads share.

        It may have been another thread: the function is not refused.
        """
        if drawn and function not in self.drew:
            self.drew[function] = drawn
            _log.warning(
                "the global generator of %s has changed while %s ran in a worker thread. If the function draws from "
                'it, its values are not reproducible: use with_generator=True, or worker_type="process".',
                min(drawn), getattr(function, "call", function),
            )  # fmt: skip

    def _key(self, where: tuple[str, int, int]) -> npt.NDArray[np.uint64]:
        return _key_of(self._seed, self._base, self._path, *where)


@lru_cache(maxsize=64)
def _key_of(seed: int, base: int, path: int, purpose: str, number: int, epoch: int) -> npt.NDArray[np.uint64]:
    own = derive(seed, epoch, purpose, path, words=1)
    return derive(base, int(own[0]), purpose, number, words=2)


def torch_generator(source: np.random.Philox) -> Any:
    """Return a torch generator on the CPU, seeded by the first number of another generator."""
    try:
        import torch
    except ImportError:
        raise MidepochError('with_generator="torch" needs torch: `pip install midepoch[torch]`.') from None
    # torch takes 64 bits, negative numbers included. The numpy generator of the same row yields other numbers.
    return torch.Generator().manual_seed(int(source.random_raw()) >> 1)


def _scrambled(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the last step of splitmix64: every bit of the result depends on all bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@lru_cache(maxsize=1)
def _thread_mode() -> Any:
    """Return the mode in which torch's random functions use a given generator. Modes belong to one thread."""
    torch: Any = sys.modules["torch"]
    names = (
        "_sample_dirichlet _standard_gamma bernoulli binomial multinomial normal poisson rand randint randn randperm"
    )
    methods = "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_"
    draws = {getattr(torch, name) for name in names.split()}
    draws |= {getattr(torch.Tensor, name) for name in methods.split()}
    others = {
        getattr(torch, name): name
        for name in ("rand_like", "randint_like", "randn_like", "dropout", "alpha_dropout", "rrelu")
    } | {getattr(torch.nn.functional, name): name for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")}

    class OwnGenerator(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __init__(self, generator: Any) -> None:
            super().__init__()
            self._generator = generator

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in draws:
                if kwargs.get("generator") is None:
                    kwargs = {**kwargs, "generator": self._generator}
            elif function in others:
                raise MidepochError(
                    f"torch.{others[function]} draws random numbers that no generator can be given for, which is not "
                    'reproducible in threads. Use worker_type="process", or torch.rand with a shape.'
                )
            return function(*args, **kwargs)

    return OwnGenerator


class GeneratorStates:
    """The states of the global generators at one moment. It takes 20 µs, numpy's own functions 80 µs each.

    A ``RandomState`` may cache a normal number beside the words of its generator, which only numpy's functions return.
    They are called only if the words differ from those for which there was no cached number.
    """

    _without_normal: bytes = b""

    def __init__(self, *, seeded: bool = False) -> None:
        """``seeded``: numpy's generator was seeded just now, which drops a cached number."""
        self._python = random.getstate()
        self.torch = _torch_state()
        self._generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._words = _words(self._generator)
        self._numpy: Any = None
        if self._words is None or not (seeded or self._words == GeneratorStates._without_normal):
            state: Any = np.random.get_state(legacy=False)
            if self._words is None or state["has_gauss"]:
                self._numpy = state
            else:
                GeneratorStates._without_normal = self._words

    @property
    def is_complete(self) -> bool:
        """True if ``drawn`` detects every draw. A cached normal number can be taken undetected."""
        return self._numpy is None

    def drawn(self) -> frozenset[str]:
        """Return the generators from which something was drawn since."""
        found = {
            "numpy.random": _words(np.random.get_bit_generator()) != self._words,  # type: ignore[attr-defined]
            "random": _brief(random.getstate()) != _brief(self._python),
            "torch": _bytes(_torch_state()) != _bytes(self.torch),
        }
        return frozenset(name for name, changed in found.items() if changed)

    def prepare(self) -> None:
        """Replace a numpy generator of the user that cannot be seeded."""
        if self._words is None:
            np.random.set_bit_generator(np.random.MT19937(0))  # type: ignore[attr-defined]

    def restore(self) -> None:
        random.setstate(self._python)
        if np.random.get_bit_generator() is not self._generator:  # type: ignore[attr-defined]
            np.random.set_bit_generator(self._generator)  # type: ignore[attr-defined]
        if self._numpy is not None:
            np.random.set_state(self._numpy)
        elif self._words is not None:
            np.random.seed(0)  # drops a cached normal number
            with self._generator.lock:
                ctypes.memmove(self._generator.ctypes.state_address, self._words, _STATE_BYTES)
        if self.torch is not None:
            _torch_generator().set_state(self.torch)


def _words(generator: Any) -> bytes | None:
    """Return the state of a Mersenne Twister. None for other generators, or if numpy stores it differently."""
    if type(generator) is not np.random.MT19937 or not _laid_out_as_known():
        return None
    with generator.lock:
        return ctypes.string_at(generator.ctypes.state_address, _STATE_BYTES)


@lru_cache(maxsize=1)
def _laid_out_as_known() -> bool:
    """Return True if numpy stores a Mersenne Twister as 624 words of 32 bits and the index of the next one."""
    generator: Any = np.random.MT19937(1)
    generator.random_raw(3)
    state = generator.state["state"]
    wanted = state["key"].astype(np.uint32).tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    stored: bytes = ctypes.string_at(generator.ctypes.state_address, len(wanted))
    return bool(stored == wanted)


def _brief(state: tuple[Any, ...]) -> tuple[int, int, float | None]:
    """Return the parts of a state of ``random`` that distinguish it, in a tenth of the time of a full comparison.

    They are the index of the next word, the first word, and a cached normal number. The first word changes whenever the
    words are generated again.
    """
    _, words, normal = state
    return words[-1], words[0], normal


def _bytes(tensor: Any) -> bytes | None:
    return None if tensor is None else ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _torch_generator() -> Any:
    """Return torch's CPU generator. None unless torch was imported."""
    return getattr(loaded("torch"), "default_generator", None)


def _torch_state() -> Any:
    generator = _torch_generator()
    return None if generator is None else generator.get_state()
