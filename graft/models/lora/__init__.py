"""LoRA adapters: trained ones (`training.py`) and finished ones that are merged (`merging.py`)."""
