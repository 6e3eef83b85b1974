"""A run's results: the record, tables, plots and one self-contained page, all made from the run folder alone."""

from lipkit.report.html import write_report
from lipkit.report.record import Record, RegressionRecord, read_record, save_evaluation, write_record

__all__ = ["Record", "RegressionRecord", "read_record", "save_evaluation", "write_record", "write_report"]

__dir__ = __all__.copy
