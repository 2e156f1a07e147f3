"""``python -m tools.deriving RECORDS``: record and derive every model type."""

from tools.deriving.deriving import main

main(record=True)
