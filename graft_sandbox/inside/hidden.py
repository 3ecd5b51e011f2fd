"""Stands in for the `__init__.py` of a package that code in the sandbox must not import."""

if not __name__.endswith("inside.hidden"):
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
