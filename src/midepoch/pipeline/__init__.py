"""Pipelines that change the number of rows, as a function of a cursor.

The outputs of such a pipeline have no positions that could be computed, so each *lane* of the epoch has a cursor of
its own: where in its rows a bounded group begins from which everything after can be made again, and how many outputs of
that group have been handed over. Cursors are nested lists of whole numbers, one level a stage:

    rows        [row, outputs]                 a bundle of rows, through all steps that look at one bundle at a time
    grouped     [inner, outputs]               batch, shuffle, best-fit packing, maps behind those: groups of outputs
    packed      [inner, tokens]                by reference: the document in which the next sequence begins, and where
    mixed       [position, schedule_version, [[pass, exhausted, inner], …]]
    concat      [number, inner]
    zip         [inner, …]

Every flow hands out chunks, and a chunk can tell the cursor behind any of its outputs. So the state follows delivery,
however far ahead work is done, and a resume makes again at most one bundle and one group a stage.
"""
