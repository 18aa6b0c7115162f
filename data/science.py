"""Science: multiple choice from SciKnowEval (level 3), asked and answered as in SDPO's data.

The hub holds one split of 28,392 rows; the paper uses the 4,335 L3 multiple-choice ones, chemistry
for training, cut 90/10 by datasets' train_test_split(0.1, seed=42) in each domain. Run on the rows
in the hub's order, that gives the authors' own split of all four domains, row by row.

The authors' scorer takes the text after the last <answer>, or the whole text without a tag, and
wants exactly the letter. Ours wants the closed tag that the prompt asks for, after the reasoning,
and reads the letter as choice.letter_of says.
"""
from collections import Counter

from data import choice, hub, thinking, tiny_rows

TRAIN = "sciknoweval"
THINK_TAGS = ("<reasoning>", "</reasoning>")

SYSTEM = """
Given a question and four options, please select the right answer. Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

For the answer, only output the letter corresponding to the correct option (A, B, C, or D), and \
nothing else. Do not restate the answer text. For example, if the answer is "A", just output:
<answer>
A
</answer>
"""

HUB = {"question": str, "choices": {"text": [str], "label": [str]}, "answerKey": str, "type": str,
       "domain": str, "details": {"level": str, "task": str, "subtask": str}}
SDPO = {"prompt": str, "answer": str, "system": str, "idx?": (int, str)}  # sdpo_*.jsonl

# Rows of the full set; another number means another version (an old V1 cache has other rows).
COUNTS = {"Biology": 500, "Chemistry": 2100, "Material": 935, "Physics": 800}
# The hub's order of tasks, on which the split depends; the files of the authors' repository differ.
ORDER = ["molecule_structure_prediction", "molar_weight_calculation",
         "molecular_property_prediction", "retrosynthesis", "reaction_prediction",
         "GB1_ftness_prediction", "fluorescence_prediction", "beta_lactamase_activity_prediction",
         "Protein_Protein_Interaction", "stability_prediction"]


def load(source: str, split: str = "train", limit: int | None = None, seed: int = 0) -> list[dict]:
    """Rows of "tiny", "sciknoweval" (chemistry; "sciknoweval:physics" another domain,
    "sciknoweval:all" all four), the hub id, or a .jsonl with the hub's or with SDPO's columns.

    split: "train" or "test". A file in SDPO's format is one split already and ignores it.
    """
    if source == "tiny":
        return tiny(split, limit, seed)
    path, domain = source, "chemistry"
    if source.startswith("sciknoweval:"):
        path, domain = source.split(":")
    rows, pool = [], []
    for place, row in hub.read_rows(path, [HUB, SDPO], split="test"):
        with hub.at(place):
            if "system" in row:
                rows.append(_row(row["system"], row["prompt"], row["answer"], row.get("idx", place),
                                 place))
            elif is_used(row):
                pool.append((place, row))
    return (rows or _split(pool, domain.capitalize(), split, path))[:limit]


def is_used(row: dict) -> bool:
    return row["details"]["level"] == "L3" and row["type"] in ("mcq-4-choices", "mcq-2-choices")


def _split(pool: list[tuple[str, dict]], domain: str, split: str, source: str) -> list[dict]:
    found = Counter(row["domain"] for _, row in pool)
    if source in ("sciknoweval", hub.SOURCES["sciknoweval"][0]) and found != COUNTS:
        raise hub.DataError(f"{source}: L3 multiple-choice rows by domain are {dict(found)}, "
                            f"expected {COUNTS} (SciKnowEval V2)")
    if split not in ("train", "test") or domain not in {*COUNTS, "All"}:
        raise hub.DataError(f"{source}: split {split}, domain {domain}; expected train or test, "
                            f"and one of {', '.join(COUNTS)}, All")
    import datasets
    rows = []
    for name in COUNTS if domain == "All" else [domain]:
        part = sorted((item for item in pool if item[1]["domain"] == name), key=_hub_order)
        if len(part) < 2:
            if domain == "All":
                continue
            raise hub.DataError(f"{source}: {len(part)} {name} rows (level L3, multiple choice), "
                                f"too few to split; found {dict(found)}")
        order = datasets.Dataset.from_dict({"i": list(range(len(part)))})
        for i in order.train_test_split(0.1, seed=42)[split]["i"]:
            place, row = part[i]
            choices = row["choices"]
            # zip: a Material row has five texts and four labels; the authors drop the fifth, too
            options = "\n".join(f"{label}: {text}" for label, text
                                in zip(choices["label"], choices["text"], strict=False))
            asked = f"{row['question']}\n\n{options}\nPlease reason step by step."
            with hub.at(place):
                rows.append(_row(SYSTEM, asked, row["answerKey"], f"{name.lower()}-{i}", place))
    return rows


def _hub_order(item: tuple[str, dict]) -> int:
    details = item[1]["details"]
    return next((ORDER.index(key) for key in (details["task"], details["subtask"]) if key in ORDER),
                len(ORDER))


def _row(system: str, question: str, answer: str, name, place: str) -> dict:
    if answer not in list("ABCDEFGHIJ"):
        raise hub.DataError(f"{place}: answer {answer!r}, expected a letter A..J")
    return {"messages": [{"role": "system", "content": system},
                         {"role": "user", "content": question}], "answer": answer, "id": str(name)}


def score(response: str, answer: str) -> tuple[float, str]:
    """1.0 if the last <answer>..</answer> after the reasoning names the option, else 0.0."""
    text = thinking.after_thinking(response)
    if text is None:
        return 0.0, "The reasoning was never closed, so there is no answer after it."
    start = text.rfind("<answer>")
    end = text.find("</answer>", start)
    if start < 0 or end < 0:
        return 0.0, "There is no <answer>..</answer> after the reasoning."
    letter = choice.letter_of(text[start + len("<answer>"):end])
    if letter is None:
        return 0.0, "The <answer> tag does not hold just the letter of one option."
    return (1.0, "") if letter == answer else (0.0, "The chosen option is wrong.")


def answer_of(response: str) -> str | None:
    """The letter in the last <answer> tag after the reasoning, or None."""
    tag = (thinking.after_thinking(response) or "").rpartition("<answer>")[2].partition("</answer>")
    return choice.letter_of(tag[0]) if tag[1] else None


def render(answer: str) -> str:
    """A perfect response: the format that the system text asks for."""
    return (f"<reasoning>\nThe right option is {answer}.\n</reasoning>\n"
            f"<answer>\n{answer}\n</answer>")


def tiny(split: str, n: int | None = None, seed: int = 0) -> list[dict]:
    """Which of four elements has a property. The facts are few: tools/sft.py teaches them."""
    return tiny_rows.collect("science", split, n, seed, lambda rng: tiny_rows.choice(
        rng, tiny_rows.ELEMENTS, "Which element is {}?", "<answer>LETTER</answer>"))
