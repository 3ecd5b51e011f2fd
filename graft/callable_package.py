"""Packages that can be called: `graft.train("quickstart")`, `graft.evaluate(policy, on="math500")`.

Python binds a subpackage to its name in the parent the first time anything inside it is imported;
a function of that name would be a function before that moment and a module after it.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from graft.registry import load


class CallablePackage(ModuleType):
    # stands for one function, whose signature and docstring editors show

    call: str
    """Its "module:name"."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return load(self.call)(*args, **kwargs)

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return load(self.call).__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(load(self.call))


def make_callable(package: str, call: str) -> None:
    """Make calls of `package` call `call`, which is imported then."""
    module: Any = sys.modules[package]
    module.__class__ = CallablePackage
    module.call = call
