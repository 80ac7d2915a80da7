"""The version of the package. It is in a module of its own, which every other one can import."""

__version__ = "0.1.0"
