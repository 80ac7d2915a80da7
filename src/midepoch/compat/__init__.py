"""Interfaces that other projects have documented, each a thin layer on the core with the same API and fewer limits."""
