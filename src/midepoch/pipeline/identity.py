"""The identity of a pipeline: the fields with which a state is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midepoch.order import Shuffle, Weighted
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node

if TYPE_CHECKING:
    from midepoch.pipeline.spec import PipelineSpec

DEFAULTS = {
    "selection": "",
    "scope": "none",
    "seed": None,
    "window": None,
    "aligned": False,
    "weights": "",
    "arguments": "",
}
"""Values that are omitted from the description of a part."""


def identity(spec: PipelineSpec) -> dict[str, Any]:
    """Return the fields with which a state of the pipeline is compared."""
    node = spec.node
    if isinstance(node.base, Leaf):
        fields = leaf_identity(node.base) | {"lanes": spec.lanes, "pipeline": node.text}
        if node.arguments or not spec.has_positions:
            fields["arguments"] = node.arguments
        return fields
    return {
        "data": node.digest,
        "rows": sum(leaf.rows for leaf in node.leaves),
        **{name: value for name, value in DEFAULTS.items() if name != "weights"},
        "lanes": spec.lanes,
        "pipeline": node.text,
        "arguments": node.arguments,
        "parts": describe(node),
    }


def leaf_identity(leaf: Leaf) -> dict[str, Any]:
    """Return the fields with which the rows of one source are compared."""
    shuffle = leaf.order.shuffle
    fields = {
        "data": leaf.source.fingerprint,
        "rows": leaf.rows,
        "selection": leaf.order.selection.text,
        "scope": shuffle.scope if shuffle else "none",
        "seed": shuffle.seed if shuffle else None,
        "window": shuffle.window if isinstance(shuffle, Shuffle) and shuffle.scope == "window" else None,
        "lanes": leaf.order.lanes,
        "aligned": isinstance(shuffle, Shuffle) and shuffle.aligned,
        "pipeline": leaf.text,
    }
    return fields | ({"weights": shuffle.digest} if isinstance(shuffle, Weighted) else {})


def describe(node: Node) -> dict[str, Any]:
    """Describe a node, as far as a state depends on it, as a tree of JSON-able dicts."""
    base = node.base
    if isinstance(base, Leaf):
        fields = leaf_identity(base) | {"pipeline": node.text, "arguments": node.arguments}
        return {name: value for name, value in fields.items() if name != "lanes" and value != DEFAULTS.get(name, ...)}
    more: dict[str, Any] = {}
    if isinstance(base, Mix):
        more = {"weights": list(base.weights)} | ({"names": list(base.names)} if base.names else {})
        more |= {"schedule": base.schedule.text} if base.schedule is not None else {}
        more |= {"learned": [*base.learned[:2], list(base.learned.weights)]} if base.learned is not None else {}
    more |= {"arguments": node.arguments} if node.arguments else {}
    return {"pipeline": node.text, **more, "parts": [describe(part) for part in base.parts]}
