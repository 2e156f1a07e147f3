"""Surveys: many checkpoints, one table, whatever interrupts it."""

from wqk.surveying.executors import dask_executor
from wqk.surveying.survey import SurveyProgress, survey

__all__ = ["SurveyProgress", "dask_executor", "survey"]
