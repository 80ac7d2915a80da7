"""Answers about data, states and runs, for the command line and for scripts.

*Plan*: what a resume would do. *Describe*: a state in words, and how two differ. *Locate*: the data of a state on this
machine. *Bench*: settings tried on this machine. *Doctor*: problems of an installation. *Report*: a run as a page.
"""
