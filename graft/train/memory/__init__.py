"""How much memory a run needs and what fits on a device; read `plan` first."""
