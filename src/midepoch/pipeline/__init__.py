"""Pipelines as a function of a cursor.

The positions of a pipeline that keeps the number of rows can be computed. Those of any other cannot, so each *lane* of
the epoch has a cursor of its own: the row at which a bounded group begins, from which all later outputs can be
recomputed, and the number of outputs of that group that have been delivered. Cursors of flows are frozen values, one
for each stage (``midepoch.pipeline.cursor``). In the middle of document 17 of a packed mix of two sources::

    StageAt(MixAt(position=40, change=0, parts=(PartAt(0, 0, RowAt(17)), PartAt(0, 0, RowAt(23)))), delivered=512)

Every flow delivers chunks, and a chunk can compute the cursor after any of its outputs. The state therefore follows
delivery, however far ahead work is done, and a resume recomputes at most one bundle and one group for each stage.
"""
