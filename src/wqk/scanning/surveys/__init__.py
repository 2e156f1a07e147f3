"""Surveys: many checkpoints, one table, resumable."""

from wqk.scanning.surveys.jobs import dask_executor
from wqk.scanning.surveys.surveying import SurveyProgress, survey

__all__ = ["SurveyProgress", "dask_executor", "survey"]
