"""Which features of a loader can be used together: all pairs, except for those that mean nothing.

``MEANINGLESS`` is the only place that says so. Errors and ``docs/combining.md`` show its sentences.
"""

from __future__ import annotations

FEATURES = {
    "sizes by step": "loader({0: 8, 1000: 16})",
    "tokens, planned": "loader(max_tokens=…), lengths known",
    "tokens at run time": "loader(max_tokens=…), after filter, mix …",
    "steps_per_epoch": "loader(…, steps_per_epoch=…)",
    "lease": "loader.lease()",
    "exclude steps": "loader.exclude(steps=…)",
    "exclude rows": "loader.exclude(rows=…), documents=, run=",
    "set_weights": "loader.set_weights(…)",
    "schedule": "mix(…, Schedule(…))",
    "context_parallel": "loader(…, context_parallel=…)",
    "provenance": "loader(…, provenance=True)",
    "collate_fn": "loader(…, collate_fn=…)",
    "micro-batches": "integrations with gradient accumulation",
    "last_batch": 'loader(…, last_batch="drop")',
    "device": "loader(…, device=…)",
}
"""The features, and how each is used."""

_SIZE_OF_TOKENS = (
    "max_tokens gives the size of a batch by its tokens, and sizes by step give it in rows. Pass the largest number of "
    "rows as batch_size, or omit max_tokens."
)
_NO_POSITIONS = (
    "batches are planned where every row of one source is one row of the dataset, and a mix has several sources. Its "
    "batches by tokens are formed at run time."
)
_SIZE_OF_MICRO = (
    "micro-batches cut a batch by its number of rows, and batches by tokens have different ones: each is a micro-batch "
    "already. Omit max_tokens, and pack sequences with Dataset.pack."
)
MEANINGLESS: dict[frozenset[str], str] = {
    frozenset({"sizes by step", "tokens, planned"}): _SIZE_OF_TOKENS,
    frozenset({"sizes by step", "tokens at run time"}): _SIZE_OF_TOKENS,
    frozenset({"tokens, planned", "tokens at run time"}): (
        "lengths are either known before rows are made, or not: a loader has one kind of batches by tokens."
    ),
    frozenset({"tokens, planned", "set_weights"}): _NO_POSITIONS,
    frozenset({"tokens, planned", "schedule"}): _NO_POSITIONS,
    frozenset({"sizes by step", "schedule"}): (
        "the phases of a schedule give the batch sizes (global_batch_size). Omit batch_size, or those of the phases."
    ),
    frozenset({"tokens, planned", "micro-batches"}): _SIZE_OF_MICRO,
    frozenset({"tokens at run time", "micro-batches"}): _SIZE_OF_MICRO,
}
"""Pairs that mean nothing, and the reason."""


def meaningless(one: str, other: str) -> ValueError:
    """Return the error for two features that mean nothing together."""
    return ValueError(f"{one} and {other}: {MEANINGLESS[frozenset({one, other})]}")


def table() -> str:
    """Return all pairs as a table in Markdown, with the reasons below it."""
    names = list(FEATURES)
    reasons = list(dict.fromkeys(MEANINGLESS.values()))
    lines = ["| | " + " | ".join(f"{number}" for number in range(1, len(names))) + " |"]
    lines.append("|" + "---|" * len(names))
    for row, name in enumerate(names[1:], 2):
        cells = []
        for column in names[: row - 1]:
            reason = MEANINGLESS.get(frozenset({name, column}))
            cells.append("✓" if reason is None else f"[{'abcdefgh'[reasons.index(reason)]}](#no-meaning)")
        cells += [""] * (len(names) - 1 - len(cells))
        lines.append(f"| {row} {name} | " + " | ".join(cells) + " |")
    notes = [f"- **{'abcdefgh'[number]}**: {reason[0].upper()}{reason[1:]}" for number, reason in enumerate(reasons)]
    return "\n".join([*lines, "", "## No meaning", "", *notes])
