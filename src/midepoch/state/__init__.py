"""The versioned state: its format, its comparison with a pipeline, and resuming from it.

*State*: a flat, JSON-able dict. *Identity*: the fields of a state that are compared. *Matching*: their comparison with
a pipeline, field by field and source by source. *Resumed*: the result of loading a state.
"""
