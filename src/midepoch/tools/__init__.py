"""Tools around a run, also as commands of ``midepoch``.

- ``plan``: the effect of a resume, before it
- ``describe``: a state in words, and the differences between two
- ``bench``: measured loader settings for this machine
- ``doctor``: problems of an installation
- ``report``: a run as an HTML page
"""
