"""The papers' tables and figures, repeated: ``python -m papers TABLE``, from the root of the repository.

Not in the wheel. ``published/`` holds each paper's figures as data; `tables` reads them, `table_runs` plans and
makes the runs, `measures` holds the measurements, `figures` draws.
"""
