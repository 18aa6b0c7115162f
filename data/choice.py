"""Multiple choice, for science, knowledge and logic: rows, and the letter that an answer names."""
import re

from data import hub

LETTER_ALONE = re.compile(r"[(\[{]?\s*([A-Ja-j])\s*[)\]}]?\s*[.:;,]?")
NEXT = r"\s*(?!(?:and|or|nor)\b|[,&/(])"  # what would name a second option
LETTER_MARKED = re.compile(r"[(\[]?([A-Ja-j])(?:\s*[)\]]\s*[.:]?|\s*[.:](?=\s)|\s+-(?=\s))" + NEXT +
                           r"\S.*", re.DOTALL)
LETTER_WORDS = re.compile(r"(?:([A-J])\s*,|([B-HJ])(?=\s))" + NEXT + "(.*)", re.DOTALL)


def letter_of(text: str) -> str | None:
    r"""The option, "A".."J", that the content of an answer tag or box names; None if it is unclear.

    Accepted: the letter alone in any case, brackets, \text{..} or bold (" b", "(C)", "\text{E}");
    a letter with a label mark and its text ("E: A polygenic .."); a capital letter, a comma or a
    blank, and words ("D, a safe choice", "B because a car moves"), but for A and I without a mark:
    an article and a pronoun. Letters inside words or later in the text never count, and two
    options named ("A or B") are none.
    """
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mathbb|boxed)\s*\{([^{}]*)\}", r"\1", text)
    text = text.replace("$", "").replace("**", "").replace("\\ ", " ").strip()
    match = LETTER_ALONE.fullmatch(text) or LETTER_MARKED.fullmatch(text)
    if match:
        return match.group(1).upper()
    match = LETTER_WORDS.fullmatch(text)
    if match and not re.search(r"\b[B-HJ]\b", match.group(3)):
        return match.group(1) or match.group(2)
    return None


def row(question: str, options: list[str], right: int, name, place: str) -> dict:
    """A multiple-choice row with a boxed letter: "A. text" lines and the recipe's last sentence."""
    if not 2 <= len(options) <= 10 or not 0 <= right < len(options):
        raise hub.DataError(f"{place}: {len(options)} options, number {right} right; expected 2 to "
                            "10 options and a number among them, from 0")
    lines = "\n".join(f"{letter}. {text}"
                      for letter, text in zip("ABCDEFGHIJ", options, strict=False))
    return {"messages": [{"role": "user", "content": f"{question}\n{lines}{hub.BOXED}"}],
            "answer": "ABCDEFGHIJ"[right], "id": str(name)}


def boxed_letter(response: str) -> str | None:
    """The letter in the last box after the reasoning, or None."""
    box, _ = hub.boxed(response)
    return letter_of(box) if box else None


def score_boxed(response: str, answer: str) -> tuple[float, str]:
    r"""1.0 if the last \boxed{..} after the reasoning names the option, else 0.0; and feedback."""
    box, why = hub.boxed(response)
    if box is None:
        return 0.0, why
    letter = letter_of(box)
    if letter is None:
        return 0.0, "The box does not hold just the letter of one option."
    return (1.0, "") if letter == answer else (0.0, "The chosen option is wrong.")
