"""Reasoning in a response: where it is, and the response without it.

A reasoning block stands between a task's tags. A closing tag without an opening one counts from the
start (its opening was in the prompt, or was lost); an unclosed one leaves nothing: it is all
reasoning, however much came before.
"""
import re
from collections.abc import Iterable

THINK_TAGS = (("<think>", "</think>"), ("<reasoning>", "</reasoning>"))
ANY_TAG = re.compile(r"<(/?)(?:think|reasoning)>")


def after_thinking(response: str) -> str | None:
    """The text after the reasoning: what follows the last closing tag, of either kind.

    CONVENTION (case Q16, M72): only text after the reasoning can be the answer, and reasoning that
    was opened and never closed leaves none (None). A lone closing tag closes from the start.
    """
    tags = list(ANY_TAG.finditer(response))
    if not tags:
        return response
    return response[tags[-1].end():] if tags[-1].group(1) else None


def _inside(text: str, tags: tuple[str, str], opened: bool) -> bytearray:
    """1 for each character of reasoning, tags included; one entry more than text, for its end."""
    inside, start = bytearray(len(text) + 1), 0 if opened else None
    for tag in re.finditer("|".join(map(re.escape, tags)), text):
        if tag.group() == tags[1]:
            start = start or 0                      # also a lone one
            inside[start:tag.end()] = b"\1" * (tag.end() - start)
            start = None
        elif start is None:
            start = tag.start()
    return inside if start is None else bytearray(b"\1" * len(inside))


def strip_thinking(text: str, tags: tuple[str, str] | None = None, opened: bool = False) -> str:
    """The text without its reasoning, stripped; "" where none is left. tags: all known ones
    where None is given, and `opened`, that the prompt opened a block, is then of <think> alone."""
    pairs = THINK_TAGS if tags is None else (tags,)
    for pair in pairs:
        inside = _inside(text, pair, opened and pair is pairs[0])
        text = "".join(c for c, hidden in zip(text, inside, strict=False) if not hidden)
    return text.strip()


def think_mask(token_texts: list[str], tags: tuple[str, str], opened: bool = False) -> list[bool]:
    """True for the tokens to keep: those that touch no character of reasoning or of its tags.

    token_texts: each token decoded alone, in order (an EOS may be ""); a token that straddles a
    tag's edge is left out. opened: the generation prompt itself opened the block.
    """
    inside, keep, start = _inside("".join(token_texts), tags, opened), [], 0
    for piece in token_texts:
        keep.append(not any(inside[start:start + max(len(piece), 1)]))
        start += len(piece)
    return keep


def response_for_demo(text: str, tags: tuple[str, str], keep_thinking: bool = False,
                      opened: bool = False, special: Iterable[str] = ()) -> str | None:
    """A response as a demonstration, or None where nothing is left of it.

    Reasoning is removed unless keep_thinking (`--demo_cot`; a block opened by the prompt then gets
    its opening tag back). special: the tokenizer's special tokens, that, spelled out, would end the
    user's turn early; removed until none is left, as removing one may join another.
    """
    special = [token for token in special if token]
    while any(token in text for token in special):
        for token in special:
            text = text.replace(token, "")
    if not keep_thinking:
        return strip_thinking(text, tags, opened) or None
    text = text.strip()
    if text and opened and not text.startswith(tags[0]):
        text = f"{tags[0]}\n{text}"
    return text or None
