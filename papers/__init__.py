"""Repeats the papers' tables and figures: ``python -m papers TABLE``, from the root of the repository.

Not in the wheel. ``published/`` holds each paper's figures as data, which `tables` reads; `table_runs` plans and makes
the runs, `measures` holds the measurements, `figures` draws, and `pages` writes the tables of the documents.
"""
