"""Interfaces that others have documented, each a thin layer on the core that keeps the form and removes the limits."""
