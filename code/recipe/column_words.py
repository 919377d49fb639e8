"""Words in the names of columns, in English and other languages: what they say about a column.

`texto`, `clean_text` and `is_spam` are found by `TEXTS`, `LABELS`, `LABEL_MARKS`, `QUESTIONS` and
`ANSWERS` if no column has a name that a task's spec lists, and no other column may be meant.
Messages propose columns by all of them. The words of many languages are in column_words.txt.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

_SHORT = 4
"""Letters of a word that may end another one by chance: `context`."""
_FORMS = {"name", "display", "str", "string", "value"}
"""Words that say how a class is written: `category_name`."""
_MOST_WORDS = 3
"""Words of a noun: `nội dung`."""
_PREPOSITIONS = {
    *("da", "de", "degli", "dei", "del", "della", "dello", "des", "di", "do", "dos", "du", "of"),
    *("van", "von"),
}
_ADDRESSES, _ADDRESSED = {"link", "links", "url", "uri"}, {"post", "tweet", "comment", "article"}
"""Words of `link_post`, which is one in Romance languages."""
_ASIDE = re.compile(r"(?<=\S)\s*[(\[][^()\[\]]*[)\]]\s*$|\.(responses|suggestion)$")
"""What a name has in brackets at its end, `Rating (1-5)`, or as in Argilla's exports."""
_WORDS = re.compile(r"[\s_.()/?¿!¡:;#*,-]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNSPACED = re.compile(r"[\u1100-\u11ff\u3040-\u30ff\u4e00-\u9fff]+")
"""Korean (as letters), Japanese and Chinese, which write compounds without spaces."""
_BARRED = str.maketrans({"ı": "i", "ł": "l", "ø": "o", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe"})
"""Letters that Unicode does not take apart."""


def plain_word(word: str) -> str:
    """Return a word in lower case without accents."""
    plain = {}
    for letter in {*word}:
        parts = unicodedata.normalize("NFKD", letter.lower().translate(_BARRED))
        plain[ord(letter)] = "".join(part for part in parts if not unicodedata.combining(part))
    return word.strip().translate(plain)


def _read_words() -> Mapping[str, frozenset[str]]:
    """Return the words of each role in column_words.txt, as they are written and plain."""
    lines: dict[str, list[str]] = defaultdict(list)
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip()
    role = ""
    for line, plain in zip(text.splitlines(), plain_word(text).splitlines(), strict=True):
        if line[0] == "#":
            continue
        if line[0] != " ":  # `text de: anfrage ...`
            role, _, _ = line.partition(":")[0].partition(" ")
        lines[role] += [one.partition(": ")[2] or one for one in (line, plain)]
    return {role: frozenset(" ".join(some).split()) for role, some in lines.items()}


_ROLES = _read_words()


def split_name(name: str) -> list[str]:
    """Return the plain words of a column's name, in their order; [""] without any."""
    text = _ASIDE.sub("", unicodedata.normalize("NFC", name).strip()).rstrip("0123456789")
    return [plain_word(word) for word in _WORDS.split(text) if word] or [""]


@functools.lru_cache(maxsize=8192)
def words_of(name: str) -> Sequence[str]:
    """Return the plain words of a column's name, the noun last and in the singular; [""] without
    any.

    The noun stands before words such as `of` (`Avis du client`) and before what qualifies it
    (`comentario libre`), first in languages that put it there (`Nội dung khiếu nại`), and at the
    end of compounds (`Kundenmeinung`).
    """
    words = split_name(name)
    if len(words) > 1 and (whole := "_".join(words)) in KNOWN:
        return [whole]
    if len(words) > 1 and words[0] in _ADDRESSES and words[-1] in _ADDRESSED:
        return [*words[1:], words[0]]
    for count in range(min(_MOST_WORDS, len(words) - 1), 0, -1):
        if (first := "_".join(words[:count])) in _ROLES["first"]:
            return [*words[count:], first]
    middle = next((n for n, word in enumerate(words) if word in _PREPOSITIONS), 0)
    if middle and "_".join(words[middle - 1 : middle + 1]) not in KNOWN:
        words = [*words[middle + 1 :], *words[:middle]]
    end = len(words)
    while end > 1 and (
        words[end - 1] in _ROLES["qualifier"] | _ROLES["copy"]
        or (words[end - 1] in _FORMS and words[end - 2] in (LABELS | _FORMS) - THINGS)
    ):
        end -= 1
    words = [*words[end:], *words[:end]]
    for start in range(max(0, len(words) - _MOST_WORDS), len(words)):
        noun = _singular("_".join(words[start:]))
        if not KNOWN.isdisjoint({noun, f"{noun}s"}):
            return [*words[:start], noun]
    *others, noun = words
    for start in range(1, len(noun)):
        part = _singular(noun[start:])
        is_part = len(part) > _SHORT or part == "text" or _UNSPACED.fullmatch(part)
        if is_part and not KNOWN.isdisjoint({part, f"{part}s"}):
            return [*others, noun[:start], part]
    if others and words[0] in _ROLES["head"]:
        return [*words[1:], words[0]]
    return [*others, _singular(noun)]


def _singular(noun: str) -> str:
    return f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")


@functools.lru_cache(maxsize=8192)
def ends_in(name: str, words: frozenset[str]) -> bool:
    """Return whether a column's name is one of some plain words, or ends in one."""
    noun = words_of(name)[-1]
    return not words.isdisjoint({plain_word(name), noun, f"{noun}s"})


def _words(*lines: str) -> frozenset[str]:
    return frozenset(plain_word(word) for line in lines for word in line.split())


def _names(*lines: str) -> frozenset[str]:
    """Return words as they are written, and without accents."""
    return _words(*lines).union(*(line.split() for line in lines))


TEXTS = _ROLES["text"] | _ROLES["body"]
"""Last words of names of texts, or whole names."""
OPINIONS = _ROLES["opinion"]
"""Last words of names of labels that say what a text says, or whole names."""
LABELS = OPINIONS | _ROLES["label"]
"""Last words of names of labels, or whole names."""
LABELLED = _ROLES["labelled"]
"""Whole names of labels that mean nothing else: that word in other languages."""
KEYS = _ROLES["key"]
"""Names of the letters or numbers of right choices."""
QUESTIONS = _ROLES["question"]
"""Names of questions and prompts."""
ANSWERS = _ROLES["answer"]
"""Names of answers."""
TITLES = _ROLES["title"]
"""Names of headings that are read with the text below them, if it has one of `BODIES`."""
BODIES = _ROLES["body"]
"""Names of texts that have a heading. A title above a review may name a product."""
METADATA = _ROLES["meta"]
"""Last words of names, or whole ones, of what is known about a sample: people, places, times."""
THINGS = _ROLES["thing"]
"""The same for what a sample is about: that may be a part of it if it is described."""
DESCRIBING = _ROLES["describing"]
"""Names of texts that describe things."""
STATES = _ROLES["state"]
"""Last words of names that say how far the work on a sample is, if it has another label."""
RECORDS = _ROLES["record"]
"""Last words of names of flags that say how a record is kept, not what its text says."""
COPIES = _ROLES["copy"]
"""Words of names of columns that repeat others in another form."""
AGGREGATES = _ROLES["computed"] | _words("average avg confidence mean median std")
"""Words in names of numbers that were computed of others."""
CONTEXTS = _ROLES["context"]
"""Names of what stands next to an instruction: its input."""
URGENCY, ROUTING, SATISFACTION, REVIEWS = (
    _ROLES[role] for role in ("urgency", "routing", "satisfaction", "review")
)
"""Words of labels that say how urgent something is, who deals with it, and what a customer thinks
of it; and words of texts that say the last, too."""
CODES = _ROLES["code"]
"""Codes of languages."""
SUMMARIES, TRANSLATIONS, LANGUAGES = (
    _ROLES["summary"],
    _ROLES["translation"],
    _ROLES["language"],
)
"""Last words of names of summaries, of translations, and names of languages."""
LABEL_MARKS = _words("is has")
"""First words of names of labels: `is_depression`."""

# Words of names that messages propose.
ASKING = QUESTIONS | _words(
    "question prompt instruction input user human query q source src context dialogue dialog",
    "informal learner article document problem request ask customer diff docstring documentation",
    "incorrect ungrammatical original abstract kontext contexte contexto artikel anchor claim",
    "premise search",
    "ingredients ingredient doc nl patient",
)
"""What is given to a model that answers, or to a search."""
ANSWERING = (
    ANSWERS
    | _ROLES["output"]
    | _words(
        "doctor answer response reply output completion assistant correction",
        "ai bot gpt target tgt trg gt highlight",
        "solution code sql agent correct corrected standard paraphrase translation zusammenfassung",
        "resumen func tldr passage positive pos function evidence hypothesis hypo jd candidate",
        "direction snippet ideal rewrite rewritten simplification simplified simple fixed rephrase",
        "ref reference counterspeech formal",
    )
)
"""What is generated, or found by a query."""
SUBJECTS = _words("headline subject summary caption betreff objet asunto assunto oggetto")
"""The short text above another one, which it belongs to. A title may name a product or a place."""
HEADINGS = SUBJECTS | _words(
    "title titel titre título titolo заголовок название тема başlık 标题 タイトル 제목"
)
REPLIES = _names(
    "companypublicresponse companyreply companyreplycontent developerresponse owneranswer",
    "developerreplytext ownerresponse replycontent responsefromowner responsefromownertext",
    "sellerreply",
)
"""Names, without separators, of what is answered to a review, which is complete without it."""
OTHER_TEXTS = _words(
    "description email data utt statement describe improve open excerpt poem quote",
    "selftext full story command bio lyric lyrics plot joke synopsis",
)
OTHER_LABELS = _ROLES["other_label"] | _words(
    "classname",
    "accept stance flag diagnosis stage variety team y result quality relevance fraudulent segment",
    "ground truth satisfied verdict decision l1 term choice cyberbullying assignment nps activity",
    "subtask a richtig disposition occupation period action frame recommend recommended",
)
"""Names of labels, among other columns of few values."""
VERDICTS = _words(
    "expected reference ideal",
    "correctness feedback helpfulness is_correct liked quality_score thumbs_up",
)
"""Names of what is thought of a completion, which may be a bad one, or of what it should be."""
PREFERRED = _words(
    "accepted best better chosen preferred winn aceptad ausgewahlt bevorzugt besser beter",
    "battre choisi elegid escolhid gekozen gewahlt lepsi lepsz meilleur mejor melhor miglior",
    "preferid scelt valgt vald vybran wybran лучш выбранн 更好 较好 优选 良い 採用 선택",
)
DISPREFERRED = _words(
    "dispreferred los rejected worse worst abgelehnt afgewezen afvist avvisad avvist",
    "gorsz horsi mauvais odmitnut odrzucon peggior peor pior pire rechazad rejeitad rejete",
    "rifiutat scartat samre schlechter slechter худш отклоненн 更差 较差 拒绝 悪い 不採用 거절",
)
"""Beginnings of words in names of the better and the worse answer to a prompt."""
WORKS = _words("album artist asin band brand cast director isbn lyric plot price song synopsis")
"""Last words of names in tables of works and products, whose titles are no part of a text."""
PARTS = _words("extracted highlighted matched quoted selected")
"""First words of names of parts of a text."""
DATES = _words("date datum data fecha дата tarih tanggal ngày 日付 日期 날짜 التاريخ दिनांक")
"""First words of names of dates: `date_avis`."""
_APART = ("code", "first", "head", "qualifier", "urgency", "routing", "satisfaction", "review")
"""Roles of words by which a noun is found, or that say more of the words of other roles."""
KNOWN = frozenset().union(
    *(words for role, words in _ROLES.items() if role not in _APART),
    *(ASKING, ANSWERING, OTHER_TEXTS, OTHER_LABELS),
)
"""All nouns of names."""
