"""``python -m wqk``: the same command where the script is not on the path."""

from wqk.cli.main import main

main()
