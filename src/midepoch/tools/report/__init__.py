"""Reports on data and runs: one self-contained HTML page, as a file or served live.

``collect`` gathers the contents as plain numbers; ``page`` puts them into HTML; ``watch`` serves the same page for a
run in progress.
"""

from midepoch.tools.report.page import collect, render

__all__ = ["collect", "render"]
