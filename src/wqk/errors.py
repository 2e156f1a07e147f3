"""Every error that wqk raises on purpose.

::

    WqkError
    ├── CheckpointError      a checkpoint that cannot be read, or cannot be trusted
    ├── HubError             a checkpoint that the hub, or the network, does not give
    ├── UnknownFamily        no rule says which tensors are the queries and keys
    ├── NonFiniteWeights     NaN or infinity among the weights
    ├── MissingPackage       an optional package that this needs is not installed
    ├── FormError            factors that do not make a bilinear form
    ├── TableError           a score table that cannot be read or written
    ├── CorpusError          text that cannot be turned into tokens
    ├── RunError             a training run or a survey that cannot start, go on or be read
    └── TheoryError          a statement that cannot be computed on a model, text or objective
"""


class WqkError(Exception):
    """Base of all errors raised by wqk; the command prints it as one line and exits with 2."""


class CheckpointError(WqkError):
    """A missing, truncated, malformed, unsupported or unsafe checkpoint."""


class HubError(WqkError):
    """A checkpoint that the hub, or the network, does not give."""


class UnknownFamily(WqkError):
    """A model whose query and key tensors wqk does not know how to find."""


class NonFiniteWeights(WqkError):
    """Query or key weights with NaN or infinite entries."""


class MissingPackage(WqkError):
    """Something that needs an optional package, which is not installed."""


class FormError(WqkError, ValueError):
    """Factors or arguments whose shapes do not fit together."""


class TableError(WqkError):
    """A score table with missing columns, or a file that cannot hold one."""


class CorpusError(WqkError):
    """Text or a token store that cannot be used."""


class RunError(WqkError):
    """A training run or a survey that cannot start, go on or be read."""


class TheoryError(WqkError):
    """A statement of the paper that cannot be computed on this model, text or objective."""
