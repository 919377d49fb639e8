"""Load tokenizers whose ids are those of their tokenizer.json.

transformers 5 takes the vocabulary from that file, and normalizer, pre-tokenizer and model from the
class that tokenizer_config.json or the model's type names (transformers issues 45701 and 48967).
If the class is not what made the file, texts get other ids than those the model has learned.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipe.console import log, say
from recipe.errors import ModelError
from recipe.models.sources.hub_files import find_file

FILE = "tokenizer.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_KEPT = ("padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces")
_PROBE = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "0 1 12 345 6789 01234567890 3.14 1,000,000 2024-01-31 12:59 50% $9.99 1st x2",
    "I'm you're they'LL DON'T we've it's 'quoted' \"double\" `code` (a/b) [c]{d} <e>",
    "Hello, world!!! What?! ... -- - _ snake_case CamelCase HTTPServer me@example.org #tag",
    "café naïve Ångström cafe\u0301 \ufb01ne \uff21\uff22\uff23 \u2460 ½ ² ß \u1e9e \u0130",
    "a  b   c    d     e        f",
    "  two blanks before and after  ",
    "line\nline\n\nline\r\n\ttab\t\ttabs \n \n\n\n  end\n",
    "def f(x):\n    if x != 0:\n        return {'a': x**2, \"b\": [1, 2]}  # note\n",
    "Привет, мир! Ёлка й 1234",
    "Καλημέρα κόσμε ΣΣς",
    "مرحبا بالعالم ١٢٣ كِتَاب",
    "שלום עולם שָלוֹם",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก ๑๒",
    "你好\uff0c世界\uff01第12章 漢字",
    "こんにちは世界 カタカナ \uff76\uff9e",
    "안녕하세요 세계 \u1112\u1161\u11ab",
    "😀 👨\u200d👩\u200d👧 ❤\ufe0f 🇩🇪 \u200b\u00a0\u3000\u2028\x07x\ufffd",
    "",
)
"""Digits, punctuation, accents, blanks, code, ten scripts and emoji."""
_READS_ENDS = transformers.__version__.startswith("4.")
"""Whether add_bos_token and add_eos_token change the special tokens that tokenizer.json adds."""
_PIECES, _PIECES_PER_TEXT = 256, 8
_ROWS, _CHARACTERS = 64, 2000
_EXPLICIT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
    "add_prefix_space": "add_prefix_space",
}
"""Settings that, if tokenizer_config.json has them, are changed in tokenizer.json's components: by
their names there."""


class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
    """A tokenizer as its tokenizer.json defines it.

    Saved, its folder names this class, for which transformers 4 and 5 read the file unchanged.
    """

    replaced = ""
    """What would have other ids."""
    can_save_slow_tokenizer = False

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """Write the files, and special tokens by their name in transformers 4, which 5 knows."""
        written = super().save_pretrained(save_directory, *args, **options)
        path = Path(save_directory) / _SETTINGS[0]
        settings = json.loads(path.read_text("utf-8"))
        if isinstance(tokens := settings.pop("extra_special_tokens", None), list):
            settings["additional_special_tokens"] = tokens
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
        return written


def load_tokenizer(location: str, texts: Sequence[str] = (), **options: Any) -> Any:
    """Return the tokenizer of a folder or a name on the hub, with the ids of its tokenizer.json.
    Raise ModelError as `match_file`, and for names of chat templates that would be saved outside of
    a model's folder; and what AutoTokenizer raises.

    Args:
        texts: Texts of the data, which are compared, too.
        options: Arguments for `from_pretrained`.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(location, **options)
    except Exception as error:
        # A class that cannot take the file's vocabulary raises errors of all kinds.
        if "trust_remote_code" in str(error) or find_file(location, FILE, options) is None:
            raise
        with contextlib.suppress(Exception):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(location, **options)
            tokenizer.replaced = "the class that its files name"
            _check_template_names(tokenizer, location)
            return tokenizer
        raise
    _check_template_names(tokenizer, location)
    return match_file(tokenizer, location, texts, **options)


def _check_template_names(tokenizer: Any, location: str) -> None:
    """Raise ModelError if a template's name is a path: transformers before 5.10 saves to it
    (CVE-2026-9856)."""
    templates = getattr(tokenizer, "chat_template", None)
    names = templates if isinstance(templates, dict) else ()
    if wrong := [name for name in names if Path(name).name != name]:
        raise ModelError(
            f"The tokenizer of {location} names chat templates {wrong}, which are paths.",
            "Name them in tokenizer_config.json as default and tool_use, or take another model.",
        )


def match_file(
    tokenizer: Any,
    location: str,
    texts: Sequence[str] = (),
    *,
    lowers_texts: bool = False,
    **options: Any,
) -> Any:
    """Return a loaded tokenizer, or one that replaces it if its ids are not those of the
    tokenizer.json from which it was loaded; that one has the attribute `replaced`.

    Tokenizers of other kinds (sentencepiece, Python, a folder's own code) are returned unchanged.
    Raise ModelError if no tokenizer of transformers has the file's ids.
    """
    kind = type(tokenizer)
    if kind is transformers.PreTrainedTokenizerFast:  # which reads the file unchanged
        tokenizer.__class__ = PreTrainedTokenizerFast
        return tokenizer
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        return tokenizer
    is_usual = kind.__module__.startswith("transformers.")
    if not is_usual or (path := find_file(location, FILE, options)) is None:
        return tokenizer
    contents = {
        name: json.loads(settings_file.read_text("utf-8"))
        for name in _SETTINGS
        if (settings_file := find_file(location, name, options))
    }
    given = {name: value for name, value in options.items() if name in _EXPLICIT}
    settings = {**contents, **contents.get(_SETTINGS[0], {}), **given}
    file = Tokenizer.from_file(str(path))
    probe = [*_PROBE, *_vocabulary_texts(file), *(text[:_CHARACTERS] for text in texts[:_ROWS])]
    if lowers_texts:
        probe = [text.lower() for text in probe]
    if _has_ids(tokenizer, file, settings, probe):
        return tokenizer
    file = Tokenizer.from_file(str(path))  # the other one has tokens of the class
    if _is_multilingual(tokenizer):
        for name in ("normalizer", "pre_tokenizer", "model", "decoder"):
            setattr(tokenizer.backend_tokenizer, name, getattr(file, name))
    else:
        usual = {name: getattr(tokenizer, name) for name in _KEPT}
        replacement = PreTrainedTokenizerFast.from_pretrained(location, **{**usual, **options})
        for name, token in tokenizer.special_tokens_map.items():
            # The class has names for tokens, which the folder may leave out.
            is_known = isinstance(token, str) and file.token_to_id(token) is not None
            if is_known and getattr(replacement, name) is None:
                setattr(replacement, name, token)
        replacement.model_max_length = tokenizer.model_max_length
        tokenizer = replacement
    if not _has_ids(tokenizer, file, settings, probe):
        raise ModelError(
            f"The tokenizer of {location} is loaded as a {kind.__name__}, whose token ids are not "
            f"those of its {FILE}.",
            "Check that both, and tokenizer_class in tokenizer_config.json, belong to the model, "
            "or use an image that was built with `--transformers 4`.",
        )
    tokenizer.replaced = f"a {kind.__name__}"
    return tokenizer


def reading_words(
    tokenizer: PreTrainedTokenizerBase, location: str, options: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that tokenizes a single word as within a text, as serving does; tokenizers
    like GPT-2's need a space before it for that.

    Args:
        location: The folder or name on the hub that it comes from.
        options: What it is loaded with.
    """
    if _reads_words(tokenizer):
        return tokenizer
    again = load_tokenizer(location, add_prefix_space=True, **options)
    again.pad_token = tokenizer.pad_token
    if not _reads_words(again) and again.is_fast:
        # tokenizer.json overrides the option.
        before = again.backend_tokenizer.pre_tokenizer
        if hasattr(before, "add_prefix_space"):
            before.add_prefix_space = True
            again.backend_tokenizer.pre_tokenizer = before
    if not _reads_words(again):
        say("warning: the tokenizer splits a single word differently from a word within a text")
    return again  # type: ignore[no-any-return]


def _reads_words(tokenizer: Any) -> bool:
    try:
        alone = tokenizer(["the", "the"], is_split_into_words=True, add_special_tokens=False)
    except (ValueError, AssertionError):  # RoBERTa's tokenizers refuse otherwise
        return False
    first, second = alone["input_ids"], tokenizer(" the the", add_special_tokens=False)["input_ids"]
    return bool(first[-1:] == second[-1:] and len(first) == len(second))


def match_sentences(
    module: Any, location: str, texts: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Give the first module of a SentenceTransformer the tokenizer of `match_file`."""
    if (tokenizer := module.tokenizer) is None:
        return
    lowers = bool(getattr(module, "do_lower_case", False))  # the library added this normalizer
    matched = match_file(tokenizer, location, texts, lowers_texts=lowers, **options)
    if matched is tokenizer:
        return
    if lowers:
        usual = matched.backend_tokenizer.normalizer
        steps = [normalizers.Lowercase(), *([] if usual is None else [usual])]
        matched.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    if module.processor is tokenizer:
        module.processor = matched
    else:
        module.processor.tokenizer = matched


def replacement_of(tokenizer: Any) -> str:
    """Return how a tokenizer was loaded if the usual way has other ids; empty if it has not."""
    usual = getattr(tokenizer, "replaced", "")
    return f"as {FILE} defines it, since {usual} would have other ids" if usual else ""


def log_replacement(tokenizer: Any) -> None:
    """Log how a tokenizer was loaded, unless it was loaded as usual."""
    if line := replacement_of(tokenizer):
        log(f"tokenizer: {line}")


def _vocabulary_texts(file: Tokenizer) -> Iterator[str]:
    """Yield texts of tokens from the whole vocabulary, and of the special ones among others."""
    size = file.get_vocab_size()
    pieces = [file.decode([number]) for number in range(0, size, max(1, size // _PIECES))]
    for first in range(0, len(pieces), _PIECES_PER_TEXT):
        some = pieces[first : first + _PIECES_PER_TEXT]
        yield " ".join(some)
        yield "".join(some)
    for token in list(file.get_added_tokens_decoder().values())[:_ROWS]:
        yield f"The film{token.content}was {token.content}  good {token.content}"


def _has_ids(
    tokenizer: Any, file: Tokenizer, settings: Mapping[str, Any], probe: Sequence[str]
) -> bool:
    """Return whether a tokenizer has the ids of the file, or of the file with the settings that
    tokenizer_config.json has for it.

    Special tokens around a text are those of the file, unless they depend on a setting or on the
    language.
    """
    backend = tokenizer.backend_tokenizer
    has_types = "token_type_ids" in tokenizer.model_input_names
    pairs = list(itertools.pairwise(probe[:5]))
    are_set = _READS_ENDS and {"add_bos_token", "add_eos_token"} & {*settings}
    has_other_ends = are_set or _is_multilingual(tokenizer)
    named, described = _strings(settings), _strings(settings.get("added_tokens_decoder"))

    def encode(reader: Tokenizer) -> list[Any]:
        reader.no_truncation()
        reader.no_padding()
        reader.encode_special_tokens = tokenizer.split_special_tokens
        plain = [item.ids for item in reader.encode_batch(list(probe), add_special_tokens=False)]
        if has_other_ends:
            return plain
        whole = reader.encode_batch([probe[0], *pairs])
        return [*plain, *((item.ids, item.type_ids if has_types else None) for item in whole)]

    try:
        loaded = encode(backend)
    except Exception:  # of the library: an unknown token that is not in the vocabulary
        return False
    known = {token.content for token in file.get_added_tokens_decoder().values()} - described
    for _, token in sorted(backend.get_added_tokens_decoder().items()):
        if token.content in known:
            continue
        if token.content not in named and file.token_to_id(token.content) is None:
            return False  # a token that only the class names, with an id beyond the vocabulary
        add = file.add_special_tokens if token.special else file.add_tokens
        add([token])
    if loaded == encode(file):
        return True
    changes = {
        there: settings[name] for name, there in _EXPLICIT.items() if settings.get(name) is not None
    }
    if not changes:
        return False
    for name in ("normalizer", "pre_tokenizer"):
        if (component := getattr(file, name)) is not None:
            state = _changed(json.loads(component.__getstate__()), changes)
            component.__setstate__(json.dumps(state).encode())
            setattr(file, name, component)
    return loaded == encode(file)


def _changed(state: Any, changes: Mapping[str, Any]) -> Any:
    """Return the state of a component with other values, at any depth."""
    if isinstance(state, list):
        return [_changed(item, changes) for item in state]
    if not isinstance(state, dict):
        return state
    return {name: changes.get(name, _changed(value, changes)) for name, value in state.items()}


def _is_multilingual(tokenizer: Any) -> bool:
    """Return whether the tokenizer's class adds tokens for languages (NLLB, mBART)."""
    return hasattr(tokenizer, "src_lang")


def _strings(value: Any) -> set[str]:
    """Return all strings within a value of JSON, names included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return set[str]().union(*map(_strings, value))
    return {value} if isinstance(value, str) else set()
