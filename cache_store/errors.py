"""What can go wrong on disk.

StoreError
├── NotFound          the row is not there, was deleted, or belongs to somebody else
├── StaleView         the caller acted on a leaf that is no longer the end of the chat
├── DataFolderBusy    another Keepwarm already writes this data folder
├── DatabaseDamaged   SQLite cannot read the file, or a newer Keepwarm wrote it
└── DiskRefused       full, read-only, or not permitted

Every message is one sentence that a person can read: what happened, what was kept, what to do.
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of everything that `cache_store` raises on purpose."""


class NotFound(StoreError):
    """The row does not exist for this owner. Says the same for "deleted" and "not yours"."""


class StaleView(StoreError):
    """The chat has moved on since the caller last looked at it; nothing was written."""


class DataFolderBusy(StoreError):
    """Another process holds the data folder's lock."""


class DatabaseDamaged(StoreError):
    """The database file is not readable as ours; it was left untouched."""


class DiskRefused(StoreError):
    """The disk did not take a write; what was stored before is unchanged."""
