"""The caches of one owner in the drawer, as plain data that our script draws (caches.js).

Titles and texts of nodes are somebody's: they are set as text nodes and never pass through a template.
"""

from __future__ import annotations

from typing import TypedDict

from chat.cache_tree import CacheBranch, CacheNode, CacheTree, ChatCaches
from chat.kind_names import KIND_NAMES
from ui.sizes import size_text


class NodeRow(TypedDict):
    """A run of tokens. `states`: where it is, as words for a person; `notes`: what else there is to say."""

    text: str
    size: str
    states: list[str]
    notes: list[str]


class BranchRows(TypedDict):
    """Nodes in a line; `depth` forks lie above. `label` says where it leaves another one."""

    depth: int
    label: str
    nodes: list[NodeRow]


class ChatRows(TypedDict):
    """One conversation. `more` says what is left out of it, if anything."""

    id: str
    title: str
    line: str
    branches: list[BranchRows]
    more: str


class Panel(TypedDict):
    """The whole section. `note` stands in the place of an empty tree."""

    summary: str
    chats: list[ChatRows]
    more: str
    note: str


def cache_panel(tree: CacheTree) -> Panel:
    """The tree in words."""
    return {
        "summary": f"{_on_disk(tree)}, {size_text(tree.live_bytes)} in memory",
        "chats": [_chat(chat) for chat in tree.chats],
        "more": f"and {_count(tree.num_hidden, 'more chat')}" if tree.num_hidden else "",
        "note": "" if tree.chats else "What is remembered of your chats will appear here.",
    }


def _on_disk(tree: CacheTree) -> str:
    if tree.max_disk_bytes is None:
        return "Nothing is saved on disk"
    return f"{size_text(tree.disk_bytes)} of {size_text(tree.max_disk_bytes)} on disk"


def _chat(chat: ChatCaches) -> ChatRows:
    places = [
        (chat.num_disk_tokens, chat.disk_bytes, "on disk"),
        (chat.num_live_tokens, chat.live_bytes, "in memory"),
    ]
    told = [
        f"{_count(tokens, 'token')} {place} ({size_text(nbytes)})"
        for tokens, nbytes, place in places
        if tokens
    ]
    return {
        "id": chat.conversation_id,
        "title": chat.title,
        "line": ", ".join(told) or "evicted",
        "branches": [_branch(branch) for branch in chat.branches],
        "more": f"and {_count(chat.num_hidden, 'more part')}" if chat.num_hidden else "",
    }


def _branch(branch: CacheBranch) -> BranchRows:
    start = branch.nodes[0].start
    return {
        "depth": branch.depth,
        "label": f"Another branch, from token {start:,} on" if start else "",
        "nodes": [_node(node) for node in branch.nodes],
    }


def _node(node: CacheNode) -> NodeRow:
    size = _count(node.num_tokens, "token")
    return {
        "text": node.text or f"Tokens {node.start:,} to {node.start + node.num_tokens:,}",
        "size": f"{size}, {size_text(node.nbytes)}" if node.nbytes else size,
        "states": _states(node),
        "notes": _notes(node),
    }


def _states(node: CacheNode) -> list[str]:
    states: list[str] = []
    if node.num_live_tokens:
        states.append("in memory" if node.num_live_tokens == node.num_tokens else "partly in memory")
    if node.nbytes:
        states.append("on disk")
    if node.was_evicted:
        states.append("evicted")
    return states


def _notes(node: CacheNode) -> list[str]:
    notes = ["other model or setting"] if node.other_setting else []
    if node.kind != "dynamic":
        notes.append(KIND_NAMES.get(node.kind, node.kind))
    return [*notes, f"shared by {node.num_chats:,} chats"] if node.num_chats > 1 else notes


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
