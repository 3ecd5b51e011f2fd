"""Training. The package is also the function: `graft.train("quickstart", "train.lr=1e-4")`.

Python binds a subpackage to its name in the parent the first time anything inside it is imported;
without the class below `graft.train` would be a function before that moment and a module after it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from graft.train.session import train_recipe

        if unknown := [name for name in kwargs if name not in ("quiet", "stream")]:
            raise TypeError(
                f"graft.train() has no argument {unknown[0]!r}; settings are texts: "
                "graft.train(RECIPE, 'train.lr=1e-4'), or a dict of sections as the recipe"
            )
        return train_recipe(*args, **kwargs)


sys.modules[__name__].__class__ = _Train
