"""The self-teacher: what it sees that the student does not, and how its weights move.

It reads the question, a sibling's successful response to it and, where wanted, what the verifier
said about the row's own attempt. Its weights phi start as the student's theta; after step s = 1, 2,
  frozen            phi stays                                          `--ema 0`, the default
  EMA               phi <- (1-a) phi + a theta, every step             `--ema a`, an update rate
  StableSDPO        phi <- (1-g) phi + g theta, when s % k == 0        `--restart_every k`, g = 1
(arXiv:2601.20802, arXiv:2607.01763; SPEC 3.) Nothing here knows a tokenizer: encode is passed in.
"""

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from data.thinking import (  # noqa: F401, SPEC names them here, data/ uses them too
    response_for_demo,
    strip_thinking,
    think_mask,
)

DEMONSTRATION_HEADING = "Here is a correct solution:"
FEEDBACK_HEADING = "Feedback on your earlier attempt:"
CLOSING = "Now solve the original question correctly."


# ---- how it moves --------------------------------------------------------------------------------

def matched_mix(ema: float, every: int) -> float:
    """The restart mix that forgets as much at once as EMA in `every` steps: 1 - (1-ema)^every."""
    return 1 - (1 - ema) ** every


class Teacher:
    """A float32 copy of the student (float64 stays), in eval mode and without gradient: `.model`.

    In bf16 the average would not move: a * delta is below half a spacing. Build it before the
    student is sharded (FSDP2 refuses deepcopy), then shard `.model` alike: the update is pairwise
    and elementwise, each rank averages its own shards. With restart_every, ema is not read.
    """

    def __init__(self, student: nn.Module, ema: float = 0.0, restart_every: int = 0,
                 restart_mix: float = 1.0):
        if not (0 <= ema <= 1 and 0 <= restart_mix <= 1 and restart_every >= 0):
            raise ValueError(f"ema {ema} and restart_mix {restart_mix} must lie in [0, 1], "
                             f"restart_every {restart_every} must not be negative")
        self.ema, self.restart_every, self.restart_mix = ema, restart_every, restart_mix
        self.last_changed = 0                       # step; its age is step - last_changed
        self.model = copy.deepcopy(student).eval().requires_grad_(False)
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                tensor.data = tensor.data.float()   # .data keeps ties; .float() narrows float64

    @property
    def frozen(self) -> bool:
        """Whether it never moves: phi is the model at the start of the run or stage."""
        return not (self.restart_mix if self.restart_every else self.ema)

    def rate(self, step: int) -> float:
        """The share of the student that enters after this step (counted from 1)."""
        if self.restart_every:
            return self.restart_mix if step % self.restart_every == 0 else 0.0
        return self.ema

    @torch.no_grad()
    def update(self, student: nn.Module, step: int) -> None:
        """Moves `.model` in place towards the student. Call it after every step, skipped or not."""
        for model in (self.model, student):         # FSDP: a forward pass without gradient leaves
                                                    # the root whole, through the next sampling
            if hasattr(model, "reshard"):
                model.reshard()
        rate = self.rate(step)
        if rate == 0:
            return
        # parameters() yields a tied weight once: at rate 0.1 it moves by 0.1, not by 0.19.
        for mine, theirs in zip(self.model.parameters(), student.parameters(), strict=True):
            if rate == 1:
                mine.copy_(theirs)
            else:
                mine.lerp_(theirs.to(mine.dtype), rate)
        for mine, theirs in zip(self.model.buffers(), student.buffers(), strict=True):
            mine.copy_(theirs)                      # a counter has no average
        self.last_changed = step


@torch.no_grad()
def mix_weights(model: nn.Module, weights: Mapping[str, Tensor], mix: float) -> None:
    """phi_0 = (1-mix) theta_0 + mix CKPT (`--teacher_init CKPT --teacher_init_mix m`), in place.

    weights: by the names of the model's parameters, of their shapes.
    """
    for name, mine in model.named_parameters():     # a tied weight once, under its first name
        mine.lerp_(weights[name].to(mine), mix)


# ---- what it sees --------------------------------------------------------------------------------

def pick_demonstrations(rewards: Tensor, group_size: int, threshold: float,
                        generator: torch.Generator) -> list[int | None]:
    """For each of the N rows another successful row of its group, drawn at random, or None.

    rewards (N,), rows of a group adjacent -> N indices into the rows. Random, since the first
    success would be copied into every sibling's prompt. One uniform number per row is drawn
    whatever the rewards, so a row's choice does not depend on other groups.
    """
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"{tuple(rewards.shape)} rewards do not split into groups of {group_size}")
    success = (rewards >= threshold).tolist()       # nan is no success
    uniform = torch.rand(len(success), generator=generator, dtype=torch.float64).tolist()
    picks: list[int | None] = []
    for i, u in enumerate(uniform):
        start = i - i % group_size
        others = [j for j in range(start, start + group_size) if success[j] and j != i]
        picks.append(others[int(u * len(others))] if others else None)
    return picks


def teacher_messages(messages: list[dict], demonstration: str | None = None,
                     feedback: str | None = None) -> list[dict]:
    """The chat with its last user message extended: question, demonstration, feedback, one request.

    A new list; with neither text (white space is none) the messages as they are. Joined, never
    formatted: LaTeX and code are full of braces. Raises ValueError without a user message.
    """
    out, extra = [dict(message) for message in messages], []
    for heading, text in ((DEMONSTRATION_HEADING, demonstration), (FEEDBACK_HEADING, feedback)):
        if text and text.strip():
            extra += [heading, text]
    if extra:
        last = max((i for i, m in enumerate(out) if m["role"] == "user"), default=None)
        if last is None:
            raise ValueError("the messages hold no user message to add a demonstration to")
        out[last]["content"] = "\n\n".join([out[last]["content"], *extra, CLOSING])
    return out


def teacher_prompt_ids(encode: Callable[[list[dict]], list[int]], messages: list[dict],
                       demonstration: str | None, feedback: str | None,
                       limit: int) -> tuple[list[int] | None, bool]:
    """(token ids of the teacher's prompt, whether it was cut to `limit` tokens).

    A cut on the left would drop the question, one on the right the assistant header: the END of the
    demonstration goes and, if none of it fits, the end of the feedback. (None, True) where the
    question itself leaves no room for either: nothing to learn from.
    """
    texts = [(demonstration or "").strip(), (feedback or "").strip()]
    ids = encode(teacher_messages(messages, *texts))
    if len(ids) <= limit:
        return ids, False
    for k, whole in enumerate(texts):
        def shown(n, k=k, whole=whole):             # the prompt with n characters of this text
            return encode(teacher_messages(messages, *texts[:k], whole[:n], *texts[k + 1:]))
        n = bisect_right(range(len(whole)), limit, key=lambda n, f=shown: len(f(n))) - 1  # that fit
        texts[k] = whole[:max(n, 0)]
        if n >= 0 and any(texts):
            return shown(n), True
    return None, True
