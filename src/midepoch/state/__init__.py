"""The versioned state: its format, what it is compared by, and how a pipeline resumes from it.

*State*: a flat, JSON-able dict. *Identity*: the fields of it that say what it belongs to. *Matching*: comparing them
with a pipeline, field by field and source by source. *Resumed*: what loading a state gives.
"""
