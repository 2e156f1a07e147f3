"""Surveys: many checkpoints, one table, resumable."""

from wqk.scanning.surveys.executors import dask_executor
from wqk.scanning.surveys.survey import SurveyProgress, survey

__all__ = ["SurveyProgress", "dask_executor", "survey"]
