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

from forks import Forks
from midepoch.dataset.digest import UndigestibleError, digest_of

SCRIPT = """
import functools, re, collections, enum
import numpy as np
from midepoch.dataset.digest import digest_of

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
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1 and len(runs.pop().strip()) == 32


def compiled(code: str, **more: Any) -> Any:
    names: dict[str, Any] = {"__name__": "__main__", **more}
    exec(compile(code, "<function>", "exec", dont_inherit=True), names)
    return names["f"]


def both(code: str, first: str, second: str) -> tuple[str, str]:
    return digest_of(compiled(code.replace("@@", first))), digest_of(compiled(code.replace("@@", second)))


CHANGES = {
    "genexpr const": ("def f(r): return {'y': ''.join('@@'+c for c in r['x'])}", "A", "B"),
    "listcomp const": ("def f(r): return {'y': ['@@'+c for c in r['x']]}", "A", "B"),
    "listcomp key": ("def f(r): return {'y': [c['@@'] for c in r['x']]}", "a", "b"),
    "dictcomp": ("def f(r): return {'@@'+c:1 for c in r['x']}", "a", "b"),
    "nested def const doc-like": ("def f(r):\n  def g(): return '@@'\n  return {'y': g()}", "a", "b"),
    "lambda const": ("f=lambda r: {'y': '@@'}", "a", "b"),
    "doc+const": ("def f(r):\n  '@@'\n  return {'y': '@@'}", "a", "b"),
    "lru_cache": ("import functools\n@functools.lru_cache\ndef f(r): return @@", "1", "2"),
    "lru_cache helper": ("import functools\n@functools.cache\ndef g(r): return @@\ndef f(r): return g(r)", "1", "2"),
    "singledispatch": (
        "import functools\n@functools.singledispatch\ndef g(r): return 0\n@g.register\ndef _(r: int): return @@\ndef f(r): return g(r)",
        "1",
        "2",
    ),
    "enum member": ("import enum\nclass M(enum.Enum):\n  A=@@\nX=M.A\ndef f(r): return X.value", "1", "2"),
    "enum class": ("import enum\nclass M(enum.Enum):\n  A=@@\ndef f(r): return M.A.value", "1", "2"),
    "intenum member default": ("import enum\nclass M(enum.IntEnum):\n  A=@@\ndef f(r,m=M.A): return r*m", "1", "2"),
    "initvar": (
        "import dataclasses\n@dataclasses.dataclass\nclass S:\n  k: dataclasses.InitVar[int]\n  def __post_init__(self,k): self.t=k\n  def __call__(self,r): return self.t\nf=S(@@)",
        "1",
        "2",
    ),
    "dataclass extra attr": (
        "import dataclasses\n@dataclasses.dataclass\nclass S:\n  k: int=0\n  def __call__(self,r): return self.t\nf=S()\nf.t=@@",
        "1",
        "2",
    ),
    "func attr": ("def f(r): return f.k*r\nf.k=@@", "1", "2"),
    "func attr helper": ("def g(r): return g.k*r\ng.k=@@\ndef f(r): return g(r)", "1", "2"),
    "defaultdict": ("import collections\nd=collections.defaultdict(lambda: @@)\ndef f(r): return d[r]", "1", "2"),
    "dict subclass missing": (
        "class V(dict):\n  def __missing__(s,k): return @@\nd=V(a=1)\ndef f(r): return d[r]",
        "1",
        "2",
    ),
    "list subclass": ("class V(list):\n  def pick(s): return @@\nd=V([1])\ndef f(r): return d.pick()", "1", "2"),
    "dict order": ("d={@@}\ndef f(r): return list(d)", "'a':1,'b':2", "'b':2,'a':1"),
    "module attr": ("import types\nm=types.ModuleType('hm2'); m.SIZE=@@\ndef f(r): return m.SIZE", "1", "2"),
    "class attr": ("class C:\n  S=@@\ndef f(r): return C.S", "1", "2"),
    "class attr via method": ("class C:\n  S=@@\n  def __call__(self,r): return self.S\nf=C()", "1", "2"),
    "base class method": (
        "class B:\n  def h(self): return @@\nclass C(B):\n  def __call__(self,r): return self.h()\nf=C()",
        "1",
        "2",
    ),
    "classmethod": ("class C:\n  @classmethod\n  def h(cls,r): return @@\nf=C.h", "1", "2"),
    "kwdefault": ("def f(r,*,k=@@): return k", "1", "2"),
    "partial": ("import functools\ndef g(k,r): return k\nf=functools.partial(g,@@)", "1", "2"),
    "partialmethod": (
        "import functools\nclass C:\n  def g(self,k,r): return k\n  h=functools.partialmethod(g,@@)\nf=C().h",
        "1",
        "2",
    ),
    "metaclass": (
        "class M(type):\n  def k(cls): return @@\nclass C(metaclass=M): pass\ndef f(r): return C.k()",
        "1",
        "2",
    ),
    "ABC": (
        "import abc\nclass B(abc.ABC):\n  @abc.abstractmethod\n  def g(self): ...\nclass C(B):\n  def g(self): return @@\n  def __call__(self,r): return self.g()\nf=C()",
        "1",
        "2",
    ),
    "Generic": (
        "import typing\nT=typing.TypeVar('T')\nclass C(typing.Generic[T]):\n  def __call__(self,r): return @@\nf=C()",
        "1",
        "2",
    ),
    "Protocol": (
        "import typing\nclass P(typing.Protocol):\n  def g(self)->int: ...\nclass C(P):\n  def __call__(self,r): return @@\nf=C()",
        "1",
        "2",
    ),
    "slots": ("class C:\n  __slots__=('k',)\n  def __call__(self,r): return self.k\nf=C(); f.k=@@", "1", "2"),
    "nparray": ("import numpy as np\na=np.arange(5)*@@\ndef f(r): return a[r]", "1", "2"),
    "np masked": ("import numpy as np\na=np.ma.array([1,2,3],mask=[@@])\ndef f(r): return a.sum()", "1,0,0", "0,1,0"),
    "np recarray obj": ("import numpy as np\na=np.array([1,'@@'],dtype=object)\ndef f(r): return a[r]", "1", "2"),
    "regex": ("import re\np=re.compile('@@')\ndef f(r): return p.sub('',r)", "1", "2"),
    "regex method": ("import re\nf=re.compile('@@').findall", "1", "2"),
    "regex flags": ("import re\np=re.compile('a',@@)\ndef f(r): return p.sub('',r)", "0", "re.I"),
    "torch tensor": ("import torch\nt=torch.ones(3)*@@\ndef f(r): return t", "1", "2"),
    "torch module": (
        "import torch\nt=torch.nn.Linear(2,2)\ntorch.nn.init.constant_(t.weight,@@)\ntorch.nn.init.constant_(t.bias,0)\ndef f(r): return t(r)",
        "1",
        "2",
    ),
    "torch nograd deco": ("import torch\n@torch.no_grad()\ndef f(r): return @@", "1", "2"),
    "vmap": ("import torch\nf=torch.vmap(lambda x: x*@@)", "1", "2"),
    "np.vectorize": ("import numpy as np\nf=np.vectorize(lambda x: x*@@)", "1", "2"),
    "contextmanager": (
        "import contextlib\n@contextlib.contextmanager\ndef g(): yield @@\ndef f(r):\n  with g() as x: return x",
        "1",
        "2",
    ),
    "itemgetter": ("import operator\nf=operator.itemgetter('@@')", "a", "b"),
    "methodcaller": ("import operator\nf=operator.methodcaller('@@')", "a", "b"),
    "str subclass": ("class S(str):\n  def x(s): return @@\nv=S('a')\ndef f(r): return v.x()", "1", "2"),
    "property": (
        "class C:\n  @property\n  def k(self): return @@\n  def __call__(self,r): return self.k\nf=C()",
        "1",
        "2",
    ),
    "descriptor __get__": (
        "class D:\n  def __get__(self,o,t): return @@\nclass C:\n  k=D()\n  def __call__(self,r): return self.k\nf=C()",
        "1",
        "2",
    ),
    "async/gen closure order": ("def mk(a,b):\n  def f(r): return a-b\n  return f\nf=mk(@@)", "1,2", "2,1"),
    "mutual rec": ("def f(r): return g(r) if r else 1\ndef g(r): return f(r-1)+@@", "1", "2"),
    "mutual rec from obj": (
        "class C:\n  def __init__(s): s.me=s; s.k=@@\n  def __call__(s,r): return s.me.k\nf=C()",
        "1",
        "2",
    ),
    "range": ("R=range(@@)\ndef f(r): return R[r]", "1", "2"),
    "slice": ("R=slice(0,@@)\ndef f(r): return r[R]", "1", "2"),
    "tuple vs list": ("R=@@\ndef f(r): return [R]", "(1,2)", "[1,2]"),
    "datetime": ("import datetime\nR=datetime.date(2020,1,@@)\ndef f(r): return R", "1", "2"),
    "decimal": ("import decimal\nR=decimal.Decimal('@@')\ndef f(r): return R", "1", "2"),
    "Path": ("import pathlib\nR=pathlib.Path('@@')\ndef f(r): return R", "1", "2"),
    "logger": ("import logging\nL=logging.getLogger('a')\ndef f(r):\n  L.info('x'); return @@", "1", "2"),
    "setdata": ("S={'a','b','@@'}\ndef f(r): return r in S", "1", "2"),
    "random.Random": ("import random\nR=random.Random(@@)\ndef f(r): return R.random()", "1", "2"),
    "rng": ("import numpy as np\nR=np.random.default_rng(@@)\ndef f(r): return R.random()", "1", "2"),
    "getattr method name": (
        "class C:\n  def a(s): return 1\n  def b(s): return 2\n  def __call__(s,r): return s.@@()\nf=C()",
        "a",
        "b",
    ),
    "builtin": ("def f(r): return @@(r)", "min", "max"),
    "global builtin alias": ("g=@@\ndef f(r): return g(r)", "min", "max"),
    "math alias": ("import math\ng=math.@@\ndef f(r): return g(r)", "sin", "cos"),
    "ufunc alias": ("import numpy as np\ng=np.@@\ndef f(r): return g(r)", "sin", "cos"),
    "np poly": ("import numpy as np\ng=np.poly1d([1,@@])\ndef f(r): return g(r)", "1", "2"),
    "cython rng method": ("import numpy as np\ng=np.random.RandomState(@@).rand\ndef f(r): return g()", "1", "2"),
    "str.join": ("g='@@'.join\ndef f(r): return g(r)", "1", "2"),
    "str translate": ("T=str.maketrans('a','@@')\ndef f(r): return r.translate(T)", "1", "2"),
    "pa table": ("import pyarrow as pa\nT=pa.table({'a':[1,@@]})\ndef f(r): return T", "1", "2"),
    "pa array": ("import pyarrow as pa\nT=pa.array([1,@@])\ndef f(r): return T", "1", "2"),
    "pa scalar": ("import pyarrow as pa\nT=pa.scalar(@@)\ndef f(r): return T", "1", "2"),
    "expr isin": (
        "import pyarrow.compute as pc\nT=pc.field('id').isin([*range(30),@@,*range(100,130)])\ndef f(r): return T",
        "31",
        "32",
    ),
    "expr long str": (
        "import pyarrow.compute as pc\nT=pc.field('id')=='x'*200+'@@'+'y'*200\ndef f(r): return T",
        "31",
        "32",
    ),
    "expr kind": ("import pyarrow.compute as pc\nT=pc.field('id')==@@\ndef f(r): return T", "'1'", "1"),
    "PIL": ("from PIL import Image\nT=Image.new('RGB',(4,4),@@)\ndef f(r): return T", "1", "2"),
    "global None->val later": ("def f(r): return K\nK=@@", "1", "2"),
    "match args": ("def f(r):\n  match r:\n    case {'@@':x}: return x", "a", "b"),
    "fstring": ("def f(r): return f'{r:@@}'", "03", "04"),
    "bool/int": ("def f(r): return @@", "1", "True"),
    "0.0/-0.0": ("def f(r): return @@", "0.0", "-0.0"),
    "nan ok": ("K=float('nan')\ndef f(r): return @@", "1", "2"),
    "star": ("def f(*r): return r@@", "", "+r"),
    "type alias generic": ("X=list[@@]\ndef f(r): return X", "int", "str"),
    "union": ("X=int|@@\ndef f(r): return isinstance(r,X)", "str", "float"),
}
"""Code of a function f, and two versions of one place in it."""

SAME = {
    "annotation only": ("def f(r: @@): return r", "int", "str"),
    "comment": ("def f(r):\n  #@@\n  return 1", "a", "b\n"),
    "class doc/lines": ("@@class C:\n  def __call__(self,r): return 1\nf=C()", "", "\n\n"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_function_has_another_digest(name: str) -> None:
    first, second = both(*CHANGES[name])
    assert first != second
    code, version, _ = CHANGES[name]
    assert len(set(both(code, version, version))) == 1, "the same function has the same digest"


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_result_changes_no_digest(name: str) -> None:
    assert len(set(both(*SAME[name]))) == 1


MODULES = """
import sys, os
sys.dont_write_bytecode = True  # files are written again in one second, of one size
sys.path.insert(0, os.getcwd())
import helpers, package.inner
from midepoch.dataset.digest import digest_of

def by_attribute(row): return helpers.double(row)
def by_constant(row): return row * helpers.SIZE
def by_import(row):
    from helpers import double
    return double(row)
def by_whole_import(row):
    import package.inner as inner
    return inner.twice(row)
def by_module(row): return call(helpers, row)
def call(module, row): return module.double(row)
def in_package(row): return package.inner.twice(row)
def unrelated(row): return row + 1
state = None
def lazily(row):
    global state
    if state is None:
        state = 5
    return state
before = digest_of(lazily)
lazily(1)
assert digest_of(lazily) == before, "what a function assigns itself is its state"
os.environ["NEW"] = "1"
for f in (by_attribute, by_constant, by_import, by_whole_import, by_module, in_package, unrelated):
    print(f.__name__, digest_of(f))
"""


def test_modules_of_the_user_are_followed(tmp_path: Path, torch_forks: Forks) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "job.py").write_text(MODULES)

    def run(factor: int, size: int, inner: int) -> dict[str, str]:
        (tmp_path / "helpers.py").write_text(f"SIZE = {size}\ndef double(x): return x * {factor}\n")
        (tmp_path / "package" / "inner.py").write_text(f"def twice(x): return x * {inner}\n")
        [done] = torch_forks.run([str(tmp_path / "job.py")], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return dict(line.split() for line in done.stdout.splitlines())

    first = run(2, 2, 2)
    assert run(2, 2, 2) == first
    changed = {name for name, digest in run(3, 2, 2).items() if digest != first[name]}
    assert changed == {"by_attribute", "by_import", "by_module"}
    changed = {name for name, digest in run(2, 3, 2).items() if digest != first[name]}
    assert {"by_constant"} <= changed <= {"by_constant", "by_import", "by_module"}
    changed = {name for name, digest in run(2, 2, 3).items() if digest != first[name]}
    assert changed == {"by_whole_import", "in_package"}


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
        generator = (i for i in range(3))
        ufunc = np.frompyfunc(lambda x: x, 1, 1)
        for value in (threading.Lock(), file, memoryview(b"a"), generator, ufunc, torch.eye(3).to_sparse()):
            with pytest.raises(UndigestibleError):
                digest_of(lambda row, value=value: row)


def test_a_tokenizer_is_the_same_before_and_after_it_was_used() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", pad_token="?")
    before = digest_of(fast)
    fast(["a", "a b"], truncation=True, max_length=1, padding=True)
    assert digest_of(fast) == before
    for name, value in (("chat_template", "{{ x }}"), ("padding_side", "left"), ("model_max_length", 7)):
        setattr(fast, name, value)
        assert digest_of(fast) != before, name
        before = digest_of(fast)
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1, "b": 0, "?": 2}, unk_token="?"))
    assert digest_of(other) != digest_of(backend)
