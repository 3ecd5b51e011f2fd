"""Models and their files. Start with `decoder.py`; `policy.py` is the interface of all kinds."""
