"""Values of people in YAML or JSON files: read strictly, written atomically."""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import shutil
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

from midepoch.errors import DataNotFoundError

_YAML = (".yaml", ".yml")
_SUFFIXES = (*_YAML, ".json")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
"""Numbers such as 1e9, which YAML 1.1 takes for text."""
_CORRECT = "Correct that line; if the file is truncated, write it again."


def read(path: str | os.PathLike[str]) -> Any:
    """Return the value in a .yaml, .yml or .json file.

    Raises DataNotFoundError, or ValueError with the line if the syntax is wrong or a key occurs twice.
    """
    file = _checked(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataNotFoundError(f"there is no file {file}. Check the path.") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a folder. Pass the path of a file.") from None
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{file} is not UTF-8 text: {problem.reason} at byte {problem.start:,}. Save it as UTF-8."
        ) from None
    return _from_yaml(text, file) if file.suffix.lower() in _YAML else _from_json(text, file)


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON-able value to a .yaml, .yml or .json file: readers see the complete old file or the new one."""
    file = _checked(path)
    if not file.parent.is_dir():
        raise DataNotFoundError(f"there is no folder {file.parent} to write {file.name} to. Create it first.")
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if file.suffix.lower() in _YAML:
        yaml = _yaml(file)
        text = yaml.dump(
            json.loads(text), Dumper=_dumper(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
        )
    _replace(Path(os.path.realpath(file)), text.encode("utf-8"))


def _checked(path: str | os.PathLike[str]) -> Path:
    file = Path(path if isinstance(path, os.PathLike) else str(path)).expanduser()
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"expected a file that ends with {', '.join(_SUFFIXES)}, got {file}")
    return file


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as new:
            new.write(data)
            new.flush()
            os.fsync(new.fileno())
        with suppress(FileNotFoundError):
            shutil.copymode(file, temporary)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _from_json(text: str, file: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{file}: {twice!r} occurs twice in one object. Remove one of them.")
        return found

    if not text.strip():
        raise ValueError(f"{file} is empty. Write it again, or restore it from a copy.")
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as problem:
        raise ValueError(
            f"{file}, line {problem.lineno}: not JSON: {problem.msg.removesuffix(' starting at')}. {_CORRECT}"
        ) from None


def _from_yaml(text: str, file: Path) -> Any:
    yaml = _yaml(file)
    try:
        return yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        hint = "Indent with spaces, not with tabs." if "'\\t'" in (problem.problem or "") else _CORRECT
        raise ValueError(f"{file}{line}: not YAML: {problem.problem or problem.context}. {hint}") from None
    except yaml.YAMLError as problem:
        raise ValueError(f"{file}: not YAML: {problem}") from None


def _yaml(file: Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'{file.name} requires PyYAML: pip install "midepoch[cli]". A .json file requires no package.', name="yaml"
        ) from None
    return yaml


@functools.cache
def _loader() -> Any:
    """Return a loader of YAML for people: keys are text, ``no`` and ``2024-01-01`` are text, ``1e9`` is a number.

    YAML 1.1 takes the key ``no``, such as a source of Norwegian text, for False.
    """
    import yaml

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
                if key.value in lines:
                    text = f"{key.value!r} occurs twice, first in line {lines[key.value]}"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
                lines[key.value] = line
            self.flatten_mapping(node)
            return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    return _resolving(PlainLoader)


@functools.cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  (the signature of PyYAML)
            return True

        def represent_text(self, data: str) -> Any:
            # In single quotes PyYAML writes a line separator such as U+0085 as it is, and reads it as a space.
            style = None if data.isprintable() else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    return _resolving(Dumper, keep_words=True)


def _resolving(kind: Any, keep_words: bool = False) -> Any:
    """Return a class of PyYAML whose plain scalars are numbers, true, false, null or text, and nothing else.

    ``keep_words``: a dumper quotes text that other readers of YAML take for something else.
    """
    dropped = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool"}
    if not keep_words:
        kind.yaml_implicit_resolvers = {
            first: [one for one in resolvers if one[0] not in dropped]
            for first, resolvers in kind.yaml_implicit_resolvers.items()
        }
        kind.add_implicit_resolver(
            "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
        )
    kind.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
    return kind
