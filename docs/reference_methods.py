"""Extension of griffe for the reference page: methods of a Dataset that are functions of other modules."""

from __future__ import annotations

import copy
from typing import Any

import griffe


class AssignedMethods(griffe.Extension):
    """Shows ``map = functions.map`` in the class Dataset as the function that it is."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:  # noqa: ARG002
        if pkg.path != "midepoch":
            return
        dataset = pkg["dataset.dataset.Dataset"]
        for name, member in list(dataset.members.items()):
            if not member.is_attribute or not str(member.value).endswith(f".{name}"):
                continue
            method = copy.copy(pkg[f"dataset.{member.value}"])
            method.parent, method.lineno = dataset, member.lineno
            method.parameters = griffe.Parameters(
                *(
                    griffe.Parameter(each.name, kind=each.kind) if each.name == "self" else each
                    for each in method.parameters
                )
            )
            method.returns = "Self" if str(method.returns) == "D" else method.returns
            dataset.members[name] = method
