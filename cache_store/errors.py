"""What can go wrong on disk.

StoreError
├── NotFound          the row is not there, was deleted, or belongs to somebody else
├── NothingThere      somebody looks into a folder in which Keepwarm never kept anything
├── StaleView         the caller acted on a leaf that is no longer the end of the chat
├── DataFolderBusy    another Keepwarm already writes this data folder
├── DatabaseDamaged   SQLite cannot read the file, or a newer Keepwarm wrote it
├── DiskRefused       full, read-only, or not permitted
├── NoRoom            the cache files may not take as much space as this one needs
├── SegmentDamaged    a cache file is not what was written
└── SegmentGone       a stored beginning was evicted or deleted since it was looked up

Every message is one sentence that a person can read: what happened, what was kept, what to do.
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of everything that `cache_store` raises on purpose."""


class NotFound(StoreError):
    """The row does not exist for this owner. Says the same for "deleted" and "not yours"."""


class NothingThere(StoreError):
    """There is no data of Keepwarm in this folder; nothing was created."""


class StaleView(StoreError):
    """The chat has moved on since the caller last looked at it; nothing was written."""


class DataFolderBusy(StoreError):
    """Another process holds the data folder's lock."""


class DatabaseDamaged(StoreError):
    """The database file is not readable as ours; it was left untouched."""


class DiskRefused(StoreError):
    """The disk did not take a write; what was stored before is unchanged."""


class NoRoom(StoreError):
    """A cache file does not fit into its budget, whatever is evicted; it was not written."""


class SegmentDamaged(StoreError):
    """A cache file is missing or is not what was written. `why` continues "the file is damaged: "."""

    def __init__(self, why: str) -> None:
        super().__init__(f"A cache file is damaged ({why}); the chat is safe; its text is read again.")
        self.why = why


class SegmentGone(StoreError):
    """What a caller holds of the segment tree is no longer so; look the beginning up again."""
