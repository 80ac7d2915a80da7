"""Pictures of data and runs: one self-contained page, as a file or served live.

``collect`` gathers what there is to see as plain numbers; ``page`` puts it into HTML; ``watch`` serves the same page
for a run in progress.
"""

from midepoch.tools.report.contents import collect
from midepoch.tools.report.page import render

__all__ = ["collect", "render"]
