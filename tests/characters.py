"""The alphabet of texts that tests draw."""

from __future__ import annotations

from hypothesis import strategies as st

ENCODABLE = st.characters(exclude_categories=["Cs"])
"""All characters of UTF-8, as by default. Hypothesis takes 7 s in a new checkout to find those by encoding each."""
