"""An attempt's view of the shop: the shared store, and the records that the attempt has changed."""

from __future__ import annotations

import copy
import hashlib
import json

from graft_envs.retail.store import Record, Store


class Database:
    """Records by table and key. `edit` copies a record on its first change, so the store stays as it is."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.changes: Store = {}

    def get(self, table: str, key: str) -> Record | None:
        """A record, to read only; None: there is none."""
        changed = self.changes.get(table, {})
        return changed[key] if key in changed else self.store[table].get(key)

    def edit(self, table: str, key: str) -> Record:
        """A record that may be changed."""
        changed = self.changes.setdefault(table, {})
        if key not in changed:
            changed[key] = copy.deepcopy(self.store[table][key])
        return changed[key]

    def digest(self) -> str:
        """A hash of everything that differs from the store: equal where two attempts end in one state."""
        differing = {
            f"{table}/{key}": record
            for table, records in self.changes.items()
            for key, record in records.items()
            if record != self.store[table][key]
        }
        text = json.dumps(differing, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
