"""Many environments behind one `reset` and `step`; read `base.py` first."""
