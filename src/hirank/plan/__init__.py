"""Peak memory of a training run before anything is loaded, and what to change so that it fits."""
