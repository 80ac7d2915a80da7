"""Helpers without a concept of their own: checks of arguments, hints in errors, threads and processes, timings,
progress lines, tables in notebooks. Nothing here is public.
"""
