"""graft from Python: the objects and functions that `import graft` gives.

    policy.py     load -> Policy: a model, its tokenizer, its chat template
    engine.py     Engine: samples from a Policy
    learner.py    Learner: trains a Policy on episodes
    collect.py    tasks -> episodes
    evaluate.py   scores with intervals
    generate.py   completions of prompts
    runs.py       whole runs: train, sft
    tracebacks.py errors in a notebook, in short

Nothing here is a second implementation: each object holds the one that a run uses.
"""

from __future__ import annotations

from graft import signatures
from graft.recipe.peer_keys import PEER_KEYS

signatures.synonyms = PEER_KEYS
