"""``python -m tests.families.deriving RECORDS``: record and derive every model type."""

from tests.families.deriving.deriving import main

main(record=True)
