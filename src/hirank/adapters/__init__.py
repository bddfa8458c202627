"""LoRA and DoRA on a model: the layers, the norm cache, conversion of PEFT models, merging."""
