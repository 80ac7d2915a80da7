"""Pipelines as a function of a cursor.

The positions of a pipeline that keeps the number of rows can be computed. Those of any other cannot, so each *lane* of
the epoch has a cursor of its own: the row at which a bounded group begins, from which all later outputs can be
recomputed, and the number of outputs of that group that have been delivered. Cursors are nested lists of integers, one
level for each stage:

    rows        [row, outputs]                 a bundle of rows, after all steps that take one bundle at a time
    grouped     [inner, outputs]               groups of outputs: batch, shuffle, best-fit packing, maps after those
    packed      [inner, tokens]                the document in which the next sequence begins, and the offset in it
    mixed       [position, schedule_version, [[pass, stage, inner], …]]
    concat      [number, inner]
    zip         [inner, …]

Every flow delivers chunks, and a chunk can compute the cursor after any of its outputs. The state therefore follows
delivery, however far ahead work is done, and a resume recomputes at most one bundle and one group for each stage.
"""
