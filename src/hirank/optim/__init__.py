"""Training all weights with the optimiser's state in low rank: GaLore and what came after it."""
