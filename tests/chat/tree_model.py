"""One chat in plain Python: what each verb makes of its messages, and of which of them are shown.

Written from what the verbs promise, not from how the store does it. Names of messages come from the app;
where each stands, what it says, which sibling is shown and what is refused are said here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Said:
    """One message. `is_ended`: a reply that came to its end by itself: there is nothing to continue."""

    parent: str | None
    role: str
    text: str
    is_ended: bool = False


@dataclass
class Tree:
    """Children in order of creation. `chosen`: which child is shown below each message (None: at the top),
    once that message is; but not below those in `undone`, where the chat ends until a redo."""

    owner: str
    system_prompt: str = ""
    messages: dict[str, Said] = field(default_factory=dict[str, Said])
    children: dict[str | None, list[str]] = field(default_factory=dict[Any, Any])
    chosen: dict[str | None, str] = field(default_factory=dict[Any, str])
    undone: set[str | None] = field(default_factory=set[Any])

    # What is there

    def path(self) -> list[str]:
        """What is shown, from the first message on."""
        return self.below(None)

    def below(self, name: str | None) -> list[str]:
        """What is shown below a message whenever it is shown itself."""
        names: list[str] = []
        while name not in self.undone and name in self.chosen:
            name = self.chosen[name]
            names.append(name)
        return names

    def down_to(self, name: str | None) -> list[str]:
        """The messages from the first one to this one."""
        names: list[str] = []
        while name is not None:
            names.append(name)
            name = self.messages[name].parent
        return names[::-1]

    @property
    def leaf(self) -> str | None:
        """The last message that is shown."""
        path = self.path()
        return path[-1] if path else None

    @property
    def is_unanswered(self) -> bool:
        """Whether the chat ends with a question: then it takes no further message."""
        return self.leaf is not None and self.messages[self.leaf].role == "user"

    @property
    def can_redo(self) -> bool:
        return self.leaf in self.undone

    def siblings(self, name: str) -> list[str]:
        return self.children[self.messages[name].parent]

    def question_of(self, name: str) -> str:
        """The message itself, or the one that it answers."""
        said = self.messages[name]
        if said.role == "user":
            return name
        assert said.parent is not None
        return said.parent

    def can_be_continued(self, name: str) -> bool:
        return self.messages[name].role == "assistant" and not self.messages[name].is_ended

    # What is done to it

    def add(self, name: str, said: Said) -> None:
        """A new last child, which is shown with all above it."""
        assert name not in self.messages
        self.messages[name] = said
        self.children.setdefault(said.parent, []).append(name)
        self.show(name)

    def show(self, name: str) -> None:
        for each in self.down_to(name):
            parent = self.messages[each].parent
            self.chosen[parent] = each
            self.undone.discard(parent)

    def undo(self) -> str | None:
        """The chat ends above its last question, whose text is returned; None where there is none."""
        question = next((name for name in reversed(self.path()) if self.messages[name].role == "user"), None)
        if question is None:
            return None
        self.undone.add(self.messages[question].parent)
        return self.messages[question].text

    def redo(self) -> None:
        self.undone.remove(self.leaf)

    def remove(self, name: str) -> None:
        """A message and all below it go. Where it was shown, the sibling before it is shown instead, else the
        one behind it; one that was undone is not replaced."""
        parent, siblings = self.messages[name].parent, self.siblings(name)
        place = siblings.index(name)
        others = siblings[:place][::-1] + siblings[place + 1 :]
        was_chosen, was_undone = self.chosen.get(parent) == name, parent in self.undone
        siblings.remove(name)
        if was_chosen:
            del self.chosen[parent]
            self.undone.discard(parent)
            if others and not was_undone:
                self.chosen[parent] = others[0]
        self._forget(name)

    def _forget(self, name: str) -> None:
        for child in self.children.pop(name, []):
            self._forget(child)
        self.chosen.pop(name, None)
        self.undone.discard(name)
        del self.messages[name]
