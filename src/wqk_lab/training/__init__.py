"""Training: tokenized text, recipes, objectives, penalties and the loop."""
