"""Training: text as tokens, recipes, objectives, penalties and the loop."""
