from .callback import ScoreCallback as ScoreCallback
from .monitor import Monitor as Monitor
