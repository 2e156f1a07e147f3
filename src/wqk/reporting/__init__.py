"""Score tables as one self-contained HTML file (extra ``report``)."""

from wqk.reporting.report import check_report, write_report

__all__ = ["check_report", "write_report"]
