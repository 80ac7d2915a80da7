"""Errors for calls and names that do not exist here: what was wrong, and the nearest equivalent."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

Hints = Mapping[str, str]
"""Names that people know from other libraries, and what to do here instead."""


def hinted(hints: Hints | None = None, name: str | None = None) -> Callable[[F], F]:
    """Return a decorator: a call with wrong arguments raises TypeError with a hint for each, and costs nothing else.

    ``name``: that of the function in messages; default: its own.
    """

    def decorate(function: F) -> F:
        called = name or function.__name__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as problem:
                # With no frame but this one, the call itself failed: the arguments do not fit the signature.
                if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
                    raise
                text = explained(called, inspect.signature(function), args, kwargs, hints or {})
                if text is None:
                    raise
            raise TypeError(text)

        return call  # type: ignore[return-value]

    return decorate


def hinted_methods(hints: Mapping[str, Hints], only: Collection[str] | None = None) -> Callable[[C], C]:
    """Return a decorator of a class: its public methods, inherited ones included, explain calls that do not fit.

    ``hints``: for each method. ``only``: these methods, if others are called at every step.
    """

    def decorate(cls: C) -> C:
        for name in dir(cls):
            if (name.startswith("_") and name != "__init__") or (only is not None and name not in only):
                continue
            method = inspect.getattr_static(cls, name)
            shown = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
            if inspect.isfunction(method) and method.__module__.partition(".")[0] == __name__.partition(".")[0]:
                setattr(cls, name, hinted(hints.get(name), shown)(method))
            elif isinstance(method, classmethod | staticmethod):
                setattr(cls, name, type(method)(hinted(hints.get(name), shown)(method.__func__)))
        return cls

    return decorate


def explained(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], hints: Hints
) -> str | None:
    """Return why a call does not fit a signature, and what does. None if it fits."""
    parameters = {key: each for key, each in signature.parameters.items() if key not in ("self", "cls")}
    given = len(args) - (len(signature.parameters) - len(parameters))
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    unknown = [] if takes_any else [key for key in kwargs if key not in parameters]
    if unknown:
        first = unknown[0]
        hint = hints.get(first) or nearest(first, parameters, "{}=") or f"It takes {_listed(parameters)}."
        return f"{name}() has no argument {first!r}. {hint}"
    positional = [key for key, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    takes_more = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters.values())
    if given > len(positional) and not takes_more:
        keywords = [key for key, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
        rest = f" Pass {_listed(keywords)} by name." if keywords else ""
        return f"{name}() takes {_count(len(positional))} by position, got {given}.{rest}"
    twice = [key for key in positional[:given] if key in kwargs]
    if twice:
        return f"{name}() got {twice[0]!r} twice: by position and by name."
    bound = {*positional[:given], *kwargs}
    needed = [
        key
        for key, each in parameters.items()
        if each.default is each.empty and key not in bound and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        hint = hints.get(f"{needed[0]} missing", "")
        return f"{name}() needs {_listed(needed)}.{' ' if hint else ''}{hint}"
    return None


def no_attribute(owner: str, name: str, names: Iterable[str], hints: Hints) -> AttributeError:
    """Return the error for an attribute that does not exist."""
    hint = "" if name.startswith("_") else hints.get(name) or nearest(name, names, "{}")
    return AttributeError(f"{owner} has no attribute {name!r}.{' ' if hint else ''}{hint}")


class Elsewhere:
    """Attribute of a class that does not exist there. Reading it raises AttributeError with a hint."""

    def __init__(self, owner: str, name: str, hint: str) -> None:
        self._text = f"{owner} has no attribute {name!r}. {hint}"

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._text)


def nearest(name: str, names: Iterable[str], form: str) -> str:
    """Return "Did you mean …?" with the nearest of some names, or "" if none is near."""
    public = [each for each in names if not each.startswith("_")]
    by_case = {each.lower(): each for each in public}
    found = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.6)
    return f"Did you mean {form.format(by_case[found[0]])}?" if found else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no arguments"


def _count(number: int) -> str:
    return "no argument" if number == 0 else f"{number} argument{'s' * (number != 1)}"
