"""Digests of functions: equal in another process, and different for everything that changes a result."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from midepoch._internal.digest import UndigestibleError, digest_of

SCRIPT = """
import functools, re, collections, enum
import numpy as np
from midepoch._internal.digest import digest_of

WORDS = {"b", "a", "c", "e", "d"}
class Kind(enum.Enum):
    A = 1
class Cleaner:
    pattern = re.compile("x+")
    def __init__(self, n): self.n, self.words = n, {"z", "y", "x"}
    def __call__(self, row): return {"a": helper(row["a"]) * self.n}
    @property
    def twice(self): return 2 * self.n
    @functools.cached_property
    def thrice(self): return 3 * self.n
    @staticmethod
    def nothing(): return 0
    @classmethod
    def made(cls): return cls(1)
def helper(x): return x + len(WORDS)
def outer(k):
    return lambda row: {"a": helper(row["a"]) + k}
Point = collections.namedtuple("Point", "x y")
values = [helper, outer(2), Cleaner(3), functools.partial(helper, x=1), {1: "a", "b": [2, (3,)]}, Kind.A, Point(1, 2),
          np.arange(5), np.float32(2), Cleaner(1).__call__, re.compile("a"), collections.Counter("abca"), len, "x".join]
print(digest_of(values))
"""


def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    runs = {
        subprocess.run(
            [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(runs) == 1 and len(runs.pop().strip()) == 32


def compiled(code: str, **more: Any) -> Any:
    names: dict[str, Any] = {"__name__": "__main__", **more}
    exec(code, names)
    return names["f"]


BASE = "def f(row, k=1):\n    return {'a': g(row['a']) + k}\ndef g(x): return x * 2"


@pytest.mark.parametrize(
    "other",
    [
        BASE.replace("+ k", "- k"),
        BASE.replace("k=1", "k=2"),
        BASE.replace("'a':", "'b':"),
        BASE.replace("x * 2", "x * 3"),
        "W = 5\n" + BASE.replace("x * 2", "x * W"),
        "W = 6\n" + BASE.replace("x * 2", "x * W"),
        "import math\n" + BASE.replace("x * 2", "math.floor(x)"),
        "def outer(n):\n    def f(row, k=1): return {'a': row['a'] + n}\n    return f\nf = outer(1)",
        "def outer(n):\n    def f(row, k=1): return {'a': row['a'] + n}\n    return f\nf = outer(2)",
        "class C:\n    def __call__(self, row): return 1\nf = C()",
        "class C:\n    def __call__(self, row): return 2\nf = C()",
        "class C:\n    @property\n    def p(self): return 2\nf = C()",
        "class C:\n    @property\n    def p(self): return 3\nf = C()",
    ],
)
def test_another_function_has_another_digest(other: str) -> None:
    variants = [BASE, other]
    assert len({digest_of(compiled(each)) for each in variants}) == 2
    assert digest_of(compiled(other)) == digest_of(compiled(other))


def test_what_changes_no_result_changes_no_digest() -> None:
    moved = "\n\n# a comment\nUNUSED = 7\n" + BASE.replace("k=1):", "k=1):\n    '''A docstring.'''")
    assert digest_of(compiled(BASE)) == digest_of(compiled(moved))


def test_values_in_a_circle_and_recursive_functions() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    assert digest_of(circle) == digest_of(circle)
    code = "def f(n): return 1 if n < 2 else n * f(n - 1)"
    assert digest_of(compiled(code)) == digest_of(compiled(code))
    assert digest_of(compiled(code)) != digest_of(compiled(code.replace("n * f", "n + f")))


@dataclass
class Box:
    value: Any


def test_arrays_tensors_expressions_and_objects_count_by_value() -> None:
    pairs = [
        (np.arange(4), np.arange(1, 5)),
        (torch.arange(4), torch.arange(1, 5)),
        (torch.arange(4), torch.arange(4).float()),
        (pc.field("a") > 1, pc.field("a") > 2),
        (Box(1), Box(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (max, min),
        ({1, 2}, {1, 3}),
        (1, True),
        (1, 1.0),
        ("1", b"1"),
        ([1, [2]], [[1], 2]),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    ]
    for first, second in pairs:
        assert digest_of(first) == digest_of(first) != digest_of(second), (first, second)


def test_what_has_no_digest_is_named(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as file:
        for value in (threading.Lock(), file):
            with pytest.raises(UndigestibleError, match="pickle"):
                digest_of(lambda row, value=value: row)


def test_a_tokenizer_is_the_same_before_and_after_it_was_used() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", pad_token="?")
    before = digest_of(fast)
    fast(["a", "a b"], truncation=True, max_length=1, padding=True)
    assert digest_of(fast) == before
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1, "b": 0, "?": 2}, unk_token="?"))
    assert digest_of(other) != digest_of(backend)
