"""Chats among values: lists of messages, each a dict with a role and its content, or dicts that have such a list."""

from __future__ import annotations

from typing import Any

MAX_MESSAGES = 30
"""Messages of a chat that are shown."""


def find_messages(value: Any) -> list[tuple[str, str]] | None:
    """Returns role and content of the messages of a chat; None if a value is not a chat.

    Of a dict with a chat at one of its keys, such as ``{"messages": [...], "id": 3}``, the other entries come first.
    """
    if _is_chat(value):
        return [(str(each["role"]), str(each["content"])) for each in value[:MAX_MESSAGES]]
    if not isinstance(value, dict) or not any(map(_is_chat, value.values())):
        return None
    others = [(str(key), str(entry)) for key, entry in value.items() if not _is_chat(entry)]
    chats = [message for entry in value.values() if _is_chat(entry) for message in find_messages(entry) or ()]
    return [*others, *chats][:MAX_MESSAGES]


def _is_chat(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(each, dict) and "role" in each and "content" in each for each in value)
