from .studying import study as study
