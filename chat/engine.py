"""The model at work over one `KVCache`: prefill reads, decode writes.

Both are generators that do one forward pass per step and then hand control back, so whoever drives them
can stop between two tokens or two chunks by not asking for more. They know ids, not text.

Prefill stops one token short of the prompt; decode begins by feeding that last token. So "everything is
cached" still yields logits, and going back to where a reply began is a plain crop to that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chat.kv_cache import KVCache
from chat.sampler import Sampler


def prefill(cache: KVCache, token_ids: Sequence[int], chunk: int) -> Iterator[int]:
    """Feed `token_ids` in chunks; after each one yield how many of them have been fed."""
    for start in range(0, len(token_ids), chunk):
        cache.feed(token_ids[start : start + chunk])
        yield min(start + chunk, len(token_ids))


def decode(cache: KVCache, last_prompt_id: int, sampler: Sampler) -> Iterator[int]:
    """Yield sampled ids without end. The id yielded last has not been fed: it is not in the cache yet."""
    token_id = last_prompt_id
    while True:
        token_id = sampler.sample(cache.feed([token_id]))
        yield token_id
