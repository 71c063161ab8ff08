"""Training: recipe, loop, checkpoints, and the language and vision models that it trains."""
