"""The tiny base: its tokenizer, its shape and its curriculum. tools/sft.py trains it.

A model of 0.8M weights that nobody pretrained has to be made the kind of student the paper starts
from: often right, always able to be right, and able to use a solution that stands in its prompt.
What is done for it:
  recall      random tokens, a gap, the same tokens again. Two heads start by looking one and two
              tokens back: with them copying forms in 200 steps (loss 0.28 on one seed), without
              them it does not (5.64). Gaps vary by row, else it is learnt as "so many back".
  clean first every fact and sum is learnt before some of them are taught wrong.
  conflict    a demonstration in the prompt, the model's own WRONG words so far, and as the next
              token what a right response has there: a teacher has to see past the student's
              mistakes. (An earlier prototype without it did not; it was not left out here.)
  noise last  without a demonstration the answers of a careless learner, whose misconceptions are
              fixed and a matter of chance: doubts for RL to resolve, a fact or a word at a time.
"""
import difflib
import random
from collections import Counter

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import data
import teacher

SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|think|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and enable_thinking %}<|think|>{% endif %}"
    "<|assistant|>{% endif %}")
# One piece: a tag, a word or a digit with the space before it, a run of newlines or of signs.
PIECE = r"</?(?:think|reasoning|answer)>| ?[A-Za-z]+| ?[0-9]|\n+| ?[^\sA-Za-z0-9]+|\s+"
IGNORED = -100  # the label of a token that is not learnt from

TASKS_FROM, NOISE_FROM = .13, .75  # parts of the curriculum: recall, clean, noisy
SHARE = {"math": 1.0, "coding": .4, "science": .7, "tooluse": .8, "logic": .8, "knowledge": .7}


def make_tokenizer(texts: list[str], size: int = 512) -> PreTrainedTokenizerFast:
    """The most frequent pieces of texts, and every byte of UTF-8 but ASCII's control characters:
    any other text comes back exactly."""
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECE), "isolated"), byte])
    # ASCII, and a character of each lead byte and of each continuation byte of UTF-8
    codes = [9, 10, 13, *range(32, 127), *range(0x80, 0xC0), *range(0xC0, 0x800, 0x40),
             *range(0x800, 0xD000, 0x1000), 0xD000, 0xE000, 0xF000,
             *range(0x10000, 0x110000, 0x40000), 0x10FFFF]
    letters = sorted({c for code in codes for c in byte.pre_tokenize_str(chr(code))[0][0]})
    count = Counter(piece for text in texts for piece, _ in pieces.pre_tokenize_str(text))
    words = [p for p, _ in count.most_common() if len(p) > 1][:size - len(SPECIAL) - len(letters)]
    scores = [*((t, 0.0) for t in SPECIAL), *((c, -10.0) for c in letters),
              *((w, -1.0) for w in words)]  # the most probable cut takes whole words
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1],
        additional_special_tokens=SPECIAL[2:], chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=1024)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A stock Llama of three layers, random from torch's global generator, but for two heads of the
    first layer, which start by looking one and two tokens back."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attention_bias=True,
        tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    for head, distance in enumerate((1, 2)):
        _look_back(model, head, distance)
    return model


def _look_back(model: LlamaForCausalLM, head: int, distance: int) -> None:
    """Sets two biases so that a head attends `distance` tokens back, whatever the tokens are.

    RoPE turns pair m of a query or key at position i by the angle i * w_m, so constant vectors
    q = turn(k, distance) score sum_m |k_m|^2 cos((i - j - distance) w_m) at distance i - j: largest
    at `distance`, and sharply so if k lives in the fast pairs alone.
    """
    config, attention = model.config, model.model.layers[0].self_attn
    size = config.hidden_size // config.num_attention_heads
    w = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)  # radians
    k = (w > .05) * (8 * size ** .5 / (w > .05).sum()) ** .5  # a score of 8 after the 1/sqrt(size)
    here = slice(head * size, (head + 1) * size)
    with torch.no_grad():
        angle = distance * w
        attention.k_proj.bias[here] = torch.cat([k, 0 * k])
        attention.q_proj.bias[here] = torch.cat([k * angle.cos(), -k * angle.sin()])


def thought(text: str, tags: tuple[str, str], think: bool) -> str:
    """A response with its working, the first line, inside the task's tags if think."""
    working, answer = text.split("\n", 1)
    return f"{tags[0]}{working}{tags[1]}\n{answer}" if think else text


def example(row: dict, tags: tuple[str, str], tokenizer, rng: random.Random,
            noise: bool) -> tuple[list[int], list[int]]:
    """(token ids, labels) of a drawn training example; labels[t] is what position t should hold."""
    think = rng.random() < .25

    def right():
        return thought(rng.choice((row["response"], row["also"])), tags, think)

    def tokens(text):
        return [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    demonstration, own = None, None
    if rng.random() < .4:
        demonstration, target = right(), tokens(right())
        if think and rng.random() < .5:
            demonstration = teacher.strip_thinking(demonstration, tags)
        if rng.random() < .5:  # conflict: own is read, target is learnt wherever the two align
            own = tokens(thought(row["wrong"], tags, think))
    elif noise:
        target = tokens(thought(row["noisy"], tags, think))
    else:
        target = tokens(right())
    prompt = tokenizer.apply_chat_template(
        teacher.teacher_messages(row["messages"], demonstration), add_generation_prompt=True,
        enable_thinking=think, tokenize=True, return_dict=False)
    read, labels = (own, aligned(own, [tokens(thought(row[k], tags, think))
                                       for k in ("response", "also")])) if own else (target, target)
    # clean, the whole text is learnt: a demonstration in a prompt is a worked answer as well
    return prompt + read, ([IGNORED] * len(prompt) if noise else prompt) + labels


def aligned(own: list[int], rights: list[list[int]]) -> list[int]:
    """Labels for a wrong response: at each position the token with which a right one goes on there.

    Taken from the right response most like it; where the two do not align there is no label.
    """
    matchers = [difflib.SequenceMatcher(None, own, right, autojunk=False) for right in rights]
    best = max(matchers, key=lambda matcher: matcher.ratio())
    labels = [best.b[0]] + [IGNORED] * (len(own) - 1)
    for i, j, size in best.get_matching_blocks():
        for k in range(min(size, len(own) - i - 1, len(best.b) - j - 1)):
            labels[i + k + 1] = best.b[j + k + 1]
    return labels


def recall(vocab: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """(ids, labels): random tokens, others, the same tokens again; the second time is learnt."""
    before, again, between = (
        [rng.randrange(len(SPECIAL), vocab) for _ in range(rng.randint(*size))]
        for size in ((1, 8), (8, 20), (1, 8)))
    start = before + again + between
    return start + again, [IGNORED] * (len(start) + 1) + again[1:]


def prepare() -> tuple[list[dict], PreTrainedTokenizerFast]:
    """(rows of all six domains, each with its task's "tags"; the tokenizer made of their texts)."""
    rows = [{**row, "task": name, "tags": task.THINK_TAGS} for name, task in data.TASKS.items()
            for seed in range(4) for row in task.tiny("train", 2000, seed)]
    texts = [thought(row[key], row["tags"], i % 4 == 0) for i, row in enumerate(rows[::8])
             for key in ("response", "also", "wrong")]
    for row in rows[::8]:  # the teacher's own sentences are in every vocabulary
        texts += [m["content"] for m in teacher.teacher_messages(row["messages"], "x", "y")]
    return rows, make_tokenizer(texts)


def examples(rows: list[dict], tokenizer, rng: random.Random, done: float,
             batch: int) -> list[tuple[list[int], list[int]]]:
    """The examples of a step, `done` (0 to 1) of the way through the curriculum."""
    vocab, noise = len(tokenizer), done >= NOISE_FROM
    copies = batch if done < TASKS_FROM else batch // 8
    drawn = [recall(vocab, rng) for _ in range(copies)]
    while len(drawn) < batch:
        row = rng.choice(rows)
        if rng.random() < SHARE[row["task"]]:
            drawn.append(example(row, row["tags"], tokenizer, rng, noise))
    return drawn
