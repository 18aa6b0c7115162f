r"""Are two mathematical answers the same? math-verify, and what it leaves open or gets wrong.

math-verify parses LaTeX into sympy and compares. Whatever is decided here on top of it is marked
CONVENTION, or with the cases of tests/rows/cases.jsonl (M..) that force it. Nothing here bounds its
time: sympy can spend hours in one big-integer power. So run it through math_workers.equal.
"""
import re

INTEGER = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")
WORDS = re.compile(r"[A-Za-z][A-Za-z .'-]*")
TEXT = r"\\(?:text|mbox|mathrm|textrm|textbf|textit|textnormal|mathbf|operatorname)\s*"
# A unit: \text{ cm}^2, or a blank and plain words (two letters may be a product); always after
# something with a number in it.
UNIT = re.compile(r"(.*(?:[0-9]|\\pi).*?)\s*(?:" + TEXT + r"\{([^{}]*)\}|(?<=[0-9}])\s+((?:[cmk]m|"
                  r"kg|ft|in|[ap]\.?m|[A-Za-z]{4})[A-Za-z. ]*))(?:\^\{?([0-9])\}?)?", re.DOTALL)
# what may stand before "=": x, a_{10}, f(2), (x, y), \angle ABC
NAME = re.compile(r"[\\A-Za-z\s|'(),]*(?:_\{?\w+\}?)?(?:\([\w\s,.-]*\))?\s*")
POWERS = {"square": "2", "sq": "2", "cubic": "3"}
UNIT_NAMES = {"inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "meter": "m", "metre": "m",
              "centimeter": "cm", "kilometer": "km", "millimeter": "mm", "hour": "h",
              "minute": "min", "second": "s", "deg": "degree", "pm": "p m", "am": "a m"}


def clean(text: str) -> str:
    r"""Typesetting removed: dollars round the whole, thin spaces, \left \right, display sizes."""
    text = re.sub(r"(?<!\.)\.$", "", text.strip()).strip()
    while re.fullmatch(r"\$[^$]*\$|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", text, re.DOTALL):
        text = text[1:-1].strip()  # the whole in dollars or in braces of its own
    text = re.sub(r"\\(?:displaystyle|left|right|limits|[bB]ig[lr]?)(?![A-Za-z])", "", text)
    text = re.sub(r"(?<=[0-9]),\\!\s*(?=[0-9])|(?<=[0-9])\{,\}(?=[0-9]{3})", ",", text)  # M02
    text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-z])|~|\xa0", " ", text)
    text = re.sub(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|\spercent)$", "%", text)
    for old, new in (("\u2212", "-"), ("\\degree", "^\\circ"), ("\u00b0", "^\\circ"),
                     ("\\varnothing", "\\emptyset"), ("\u221e", "\\infty"), ("\u03c0", "\\pi "),
                     ("<=", "\\le "), (">=", "\\ge "), ("!=", "\\ne ")):
        text = text.replace(old, new)
    text = re.sub(r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty", text)
    return re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text).strip()


def integer(text: str) -> str | None:
    """A canonical integer, thousands separators gone ("1,234" but not "1, 234", M04), or None."""
    text = clean(text).removeprefix("\\$").removeprefix("$")
    if not INTEGER.fullmatch(text):
        return None
    digits = text.replace(",", "").lstrip("+-").lstrip("0") or "0"
    return "-" + digits if text.startswith("-") and digits != "0" else digits


def split_mark(text: str) -> tuple[str, str]:
    r"""(what is left, its mark): a unit, currency, degree or percent sign, base or ordinal ending.

    CONVENTION: a mark that only one side states is forgiven, two that differ are a wrong answer
    (M42 to M45, M47). A choice letter or a word in \text{..} is no unit (M40, M41, M46).
    """
    if match := re.fullmatch(r"(?:\\\$|\$)\s*(.+)", text, re.DOTALL):
        return match.group(1), "dollar"
    if match := re.fullmatch(r"(.+?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|(%))", text, re.DOTALL):
        return match.group(1), match.group(2) or "degree"
    if match := re.fullmatch(r"([0-9][0-9A-Z]*)_\{?([0-9]+)\}?", text):
        return match.group(1), "base " + match.group(2)
    if match := re.fullmatch(rf"([0-9]+)\s*\^?\s*\{{*(?:{TEXT}\{{)?(?:st|nd|rd|th)\}}*", text):
        return match.group(1), ""  # an ordinal ending is wording, never a mark that could differ
    match = UNIT.fullmatch(text)
    if not match:
        return text, ""
    words = re.sub(r"[^a-z%]+", " ", (match.group(2) or match.group(3)).lower()).split()
    power = match.group(4) or next((POWERS[word] for word in words if word in POWERS), "")
    words = [word.removesuffix("s") if len(word) > 2 else word for word in words]
    words = [UNIT_NAMES.get(word, word) for word in words if word not in POWERS]
    return match.group(1), " ".join(words) + power


def equal(gold: str, answer: str) -> bool:
    """The verdict. gold is trusted, answer is any text of at most a few thousand characters."""
    gold, answer = _join(clean(gold)), _join(clean(answer))
    if not gold or not answer:
        return False  # an empty box is no 0 (M73)
    if _compact(gold) == _compact(answer):
        return True
    (gold, gold_mark), (answer, answer_mark) = split_mark(gold), split_mark(answer)
    if gold_mark and answer_mark and gold_mark != answer_mark:
        return False
    if answer_mark.startswith("base ") and not gold_mark:  # a plain gold is in base ten
        base = int(answer_mark[5:])
        try:
            return integer(gold) == str(int(answer, base))
        except ValueError:  # no such base, or a digit that it does not have
            return False
    if gold_mark.startswith("base "):  # digits, not a number: 2A_16
        return answer.lstrip("0") == gold.lstrip("0")
    if "%" in (gold_mark, answer_mark) and gold_mark != answer_mark:
        # CONVENTION: without the sign on one side, 50% is 50 or 0.5; without any sign 50 is never
        # 0.5 (M27, M28, M30)
        percent, plain = (gold, answer) if gold_mark == "%" else (answer, gold)
        return _same(percent, plain) or _same(rf"\frac{{{percent}}}{{100}}", plain)
    return _same(gold, answer)


def _join(text: str) -> str:
    r"""A list written with "and" or "or" is one written with commas (M06, M08, M10)."""
    text = re.sub(rf"{TEXT}\{{\s*,?\s*(?:and|or)\s*\}}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ",",
                  text)
    return re.sub(r"\s*(,\s*)+", lambda match: "," if match.group() == "," else ", ", text)


def _compact(text: str) -> str:
    r"""Without the blanks that part nothing: "( 1 )", but not "1 2", "1, 234" or "\pi r"."""
    return re.sub(r"(?<![0-9A-Za-z,])\s+|\s+(?![0-9A-Za-z])", "", text)


def _same(gold: str, answer: str) -> bool:
    import math_verify.grader
    math_verify.grader.sympy_numeric_eq = _numbers_equal
    from math_verify import parse, verify
    gold_words, answer_words = _words(gold), _words(answer)
    if gold_words or answer_words:  # CONVENTION: words are compared without case (M41, M46)
        return gold_words == answer_words
    if integer(gold) and integer(answer):
        return integer(gold) == integer(answer)
    dots = r"\\[lc]?dots[cb]?|\.\.\."
    if re.search(dots, gold + answer):  # CONVENTION: a sequence with dots is compared as text (M12)
        gold, answer = (re.sub(r"[\s{}]", "", re.sub(dots, "...", text)) for text in (gold, answer))
        return gold == answer
    if ":" in gold and ":" in answer:  # CONVENTION: ratios and times are equal part by part (M49)
        parts, others = gold.split(":"), answer.split(":")
        return len(parts) == len(others) and all(map(equal, parts, others))
    if ("=" in gold) != ("=" in answer):  # CONVENTION: "x = 5" is 5, "x^2 - 5 = 0" is not 0
        named, other = (gold, answer) if "=" in gold else (answer, gold)
        name, *middle, value = named.split("=")
        if not middle or "," not in named:
            is_value = not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", name))
            return bool(is_value or NAME.fullmatch(name)) and _same(value, other)
    trees = [parse(f"\\boxed{{{_tidy(text)}}}", _configs(), fallback_mode="no_fallback",
                   parsing_timeout=None) for text in (gold, answer)]
    return verify(*trees, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True)


def _words(text: str) -> str:
    r"""Lower-case words of a \text{..} answer, (C) without its brackets; "" if it is none."""
    inner = re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r"\1", text)
    inner = inner.strip().strip("()").strip()
    is_text = (inner != text and WORDS.fullmatch(inner)
               or re.fullmatch(r"[A-J]|[A-Za-z]{3,}", inner))
    return " ".join(inner.lower().split()) if is_text else ""


def _tidy(text: str) -> str:
    text = re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r" \1 ", text)  # M40
    if integer(text):
        return integer(text)
    # CONVENTION: 2 1/2 and 2\frac12 are mixed numbers (M36); math-verify knows the second
    text = re.sub(r"(?<![0-9.])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)", r"\1\\frac{\2}{\3}", text)
    return text.replace("^\\circ", "")


def _configs() -> list:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig
    return [LatexExtractionConfig(normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"))]


def _numbers_equal(gold, answer, *_) -> bool:
    """Replaces math-verify's comparison of numbers, which drops what is under 1e-15 (M33 to M35)
    and rounds to six places behind the point, so that 1e-7 is 2e-7.

    Exact values are compared exactly, or to 30 digits where they are irrational. CONVENTION: a
    decimal stands for a value that has no finite decimal if it is right to six significant digits.
    """
    from sympy import Float, MatrixBase, Rational
    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        return (isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase)
                and gold.shape == answer.shape
                and all(map(_numbers_equal, gold.flat(), answer.flat())))
    try:
        gold, answer = gold.doit(), answer.doit()
        decimal = bool(gold.atoms(Float) | answer.atoms(Float))
        gold, answer = (value.xreplace({f: Rational(str(f)) for f in value.atoms(Float)}).doit()
                        for value in (gold, answer))
        if not (gold.is_number and answer.is_number):
            return False  # left to symbolic comparison
        if gold == answer:
            return True
        finite = [value.is_Rational and pow(10, value.q.bit_length(), value.q) == 0
                  for value in (gold, answer)]
        if gold.is_Rational and answer.is_Rational and (all(finite) or not decimal):
            return False
        error, size = abs(gold - answer).evalf(30), abs(gold).evalf(30)
        return bool(error <= size * (1.0001e-6 if decimal else 1e-25))
    except (AttributeError, TypeError, ValueError):  # sets, relations, nan: no numbers
        return False
