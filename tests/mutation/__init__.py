"""Mutation testing: changes of one expression of the library, each of which some test should notice."""
