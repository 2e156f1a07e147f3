"""Score tables as one HTML file that needs nothing else (extra ``report``)."""

from wqk.reporting.report import check_report, write_report

__all__ = ["check_report", "write_report"]
