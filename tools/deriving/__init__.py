"""Families derived by running models: every model type of `transformers`, tiny and random.

- `shrinking`: a configuration's default made tiny.
- `building`: the random model, and what it is given to read.
- `tracing`: the operations of a forward pass, and the products q·k that a softmax was taken of.
- `judging`: these products next to the forms that wqk reads from the saved file.
- `probing`: all model types, one process each; results in a JSON Lines file.
"""
