from .callback import ScoreCallback as ScoreCallback
from .clipping import Clipper as Clipper
from .clipping import Clipping as Clipping
from .clipping import clip_ as clip_
from .monitor import Monitor as Monitor
