from . import atlas as atlas
from . import claims as claims
from . import figures as figures
from . import theory as theory
from .runs.speedup import speedups as speedups
from .theory.studying import study as study
from .training.corpus import build_corpus as build_corpus
from .training.experiments import read_experiments as read_experiments
from .training.experiments import run_experiments as run_experiments
from .training.glue import fine_tune as fine_tune
from .training.recipe import make_recipe as make_recipe
from .training.training import train as train

# The names of their commands.
corpus = build_corpus
experiments = run_experiments
glue = fine_tune
speedup = speedups
