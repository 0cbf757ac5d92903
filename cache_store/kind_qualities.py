"""What measuring a kind of cache gave, kept so that it is measured once for each model.

The key is everything that the figures depend on, as a mapping of names to values. Nothing here belongs to
an owner: the figures are about a model and a text of our own.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_store.database import Database
from cache_store.records import KindQuality
from cache_store.rows import pack_json


class KindQualities:
    """See the module. Safe to use from any thread; raises `StoreError`s."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, fields: Mapping[str, str]) -> KindQuality | None:
        """What was measured under exactly these fields."""
        row = self._database.row(
            "SELECT mean_kl, top1_agreement FROM kind_qualities WHERE fields = ?", [_key(fields)]
        )
        return None if row is None else KindQuality(row["mean_kl"], row["top1_agreement"])

    def put(self, fields: Mapping[str, str], quality: KindQuality) -> None:
        """Keep it, in the place of an earlier one."""
        self._database.execute(
            "INSERT OR REPLACE INTO kind_qualities (fields, mean_kl, top1_agreement) VALUES (?, ?, ?)",
            [_key(fields), quality.mean_kl, quality.top1_agreement],
        )


def _key(fields: Mapping[str, str]) -> str:
    return pack_json(dict(sorted(fields.items())))
