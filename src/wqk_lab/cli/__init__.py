"""The laboratory's verbs, ``wqk lab VERB``, one file each.

The entry point ``laboratory`` of the group ``wqk.commands`` names `COMMANDS`.
"""

# Sections of the help, and the verbs in each: the module of which they are, by name.
COMMANDS = {
    "Train": ("corpus", "train", "experiments", "speedup", "glue"),
    "Explain the paper": ("atlas", "claims", "pairs", "figure", "theory"),
}
