"""The command line: one verb, one file. Nothing here imports torch before a verb runs."""
