"""wqk: read, measure and follow the query-key form of self-attention, W_qk = W_q W_kᵀ.

The public names are listed in ``__init__.pyi`` and imported on first use. Therefore the command
starts quickly, and small tasks load no heavy libraries.
"""

from wqk import errors
from wqk._guesses import CALLS
from wqk._synonyms import FUNCTIONS

# Commands whose functions have another name.
COMMAND_NAMES = {"report": "write_report", "tokens": "match_tokens"}

__getattr__, __dir__, __all__ = errors.public(__name__, __file__, COMMAND_NAMES, CALLS, FUNCTIONS)
