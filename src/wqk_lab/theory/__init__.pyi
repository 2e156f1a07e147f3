from .study import study as study
