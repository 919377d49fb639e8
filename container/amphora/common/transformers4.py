"""Finds code for transformers 4 if version 5 is installed.

Version 5 ignores some arguments without a warning. `check` parses the user's files before they run,
and raises an error that names each such use. To errors of code that version 5 refuses, `remedy`
adds advice.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from amphora.common.errors import CodeError

IMAGE = "build the image with transformers 4 (./build_and_push.sh gpu|cpu --transformers 4)"
_OWN_TASK = "leave out model_fn: the image's own handlers answer this task (HF_TASK)"
REMOVED: Mapping[str, str] = {
    # Tasks of `pipeline`.
    **dict.fromkeys(
        ("question-answering", "summarization", "translation", "text2text-generation"), _OWN_TASK
    ),
    "visual-question-answering": 'write pipeline("image-text-to-text")',
    "image-to-image": "call the model and its image processor",
    # Methods of tokenizers.
    "encode_plus": "call the tokenizer itself: tokenizer(text, ...)",
    "batch_encode_plus": "call the tokenizer itself: tokenizer(texts, ...)",
    "prepare_seq2seq_batch": "write tokenizer(texts, text_target=targets, ...)",
    "as_target_tokenizer": "write tokenizer(text_target=targets, ...)",
    "prepare_for_model": "call the tokenizer itself: tokenizer(text, ...)",
    "build_inputs_with_special_tokens": "call the tokenizer itself: tokenizer(text, ...)",
    "create_token_type_ids_from_sequences": "call the tokenizer itself: tokenizer(a, b, ...)",
    "to_bettertransformer": "leave it out: torch's fused attention is used without it",
    "special_tokens_map_extended": "write special_tokens_map",
    "additional_special_tokens": "write extra_special_tokens",
    # Arguments that are refused.
    "grouped_entities": 'write aggregation_strategy="simple"',
    "ignore_subwords": 'write aggregation_strategy="first"',
    "torchscript": "call torch.jit.trace on a model with return_dict=False",
    **dict.fromkeys(
        ("resume_download", "overwrite_output_dir", "save_safetensors"), "leave it out"
    ),
    "use_auth_token": "write token",
    "load_in_8bit": "write quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "load_in_4bit": "write quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    # Arguments of Trainer and TrainingArguments; others have no counterpart.
    "evaluation_strategy": "write eval_strategy",
    "tokenizer": "write processing_class",
    "no_cuda": "write use_cpu",
    "warmup_ratio": "write warmup_steps (a fraction below 1 is a share of the steps)",
    "group_by_length": 'write train_sampling_strategy="group_by_length"',
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "per_gpu_train_batch_size": "write per_device_train_batch_size",
    "per_gpu_eval_batch_size": "write per_device_eval_batch_size",
    # Names of the package.
    "AdamW": "import it from torch.optim",
    "AutoModelWithLMHead": "use AutoModelForCausalLM, ...MaskedLM or ...Seq2SeqLM",
    "AutoModelForVision2Seq": "use AutoModelForImageTextToText",
    **dict.fromkeys(("TextDataset", "LineByLineTextDataset"), "use the datasets library"),
    "SummarizationPipeline": _OWN_TASK,
    "TranslationPipeline": _OWN_TASK,
    "Text2TextGenerationPipeline": _OWN_TASK,
    "QuestionAnsweringPipeline": _OWN_TASK,
}
"""What transformers 5 has removed, and what to do instead."""
IGNORED: Mapping[str, str] = {
    "return_all_scores": "write top_k=None (the answer for one text is then a flat list)",
    "multi_class": "write multi_label",
    "pad_to_max_length": 'write padding="max_length"',
    "head_mask": "version 5 has no replacement",
}
"""Arguments that 5 silently ignores."""
NOT_IN_4 = frozenset({"AdamW", "pad_to_max_length"})
"""Names that the last transformers 4 lacks too, so that its image is not a remedy."""
_TEMPLATE = "apply_chat_template"
_TEMPLATE_CHANGE = (
    f"{_TEMPLATE} returns a dict of tensors, where transformers 4 returned the token ids:"
    " pass return_dict=False for the ids, or return_dict=True and write generate(**inputs)"
)
_MASK = "attention_mask"
_MASK_CHANGE = (
    "generate of an encoder-decoder reads padding as text unless it is given the mask, which"
    f" transformers 4 made of the padding: pass {_MASK}=encoded[{_MASK!r}], or"
    " generate(**encoded)"
)
_PADS = frozenset({"True", "'longest'", "'max_length'"})
_VOCABULARIES = frozenset({"vocab_file", "merges_file"})
_TENSORS = frozenset({"input_ids", "attention_mask", "items", "keys", "values", "data", "get"})
# Patterns are compiled when they are used: compiling them would delay every start.
_REBUILT = (
    r"(Albert|Bart|Bert|Deberta|DebertaV2|DistilBert|Electra|GPT2|Llama|Longformer|MBart|"
    r"MobileBert|MPNet|Pegasus|Roberta|T5|XLMRoberta|XLNet)Tokenizer(Fast)?"
)
"""Tokenizers that read no `vocab_file` in 5."""
_ENCODER_DECODER = r"(?!Whisper|Speech)\w*(Seq2SeqLM|ForConditionalGeneration|MTModel)"
_RAISED = (
    r"cannot import name '(\w+)' from '?transformers",
    r"module transformers(?:\.\w+)* has no attribute (\w+)",
    r"module 'transformers[\w.]*' has no attribute '(\w+)'",
    r"No module named 'transformers\.([\w.]+)",
    r"Train(?:er|ingArguments)\.__init__\(\) got an unexpected keyword argument '(\w+)",
    r"The task (translation|[\w-]+)\w* has been removed from transformers",
    r"Unknown task ([\w-]+), available tasks are",
    r"\w+ has no attribute '?(\w+)$",
    r"(?<!Accelerator\.__init__\(\) got an )unexpected keyword argument '(\w+)",
)
_ALWAYS = 5
"""The first of these are transformers' own, whatever the name; others need one of the tables."""


@functools.cache
def installed() -> str:
    """Return the version of the installed transformers; "" if there is none, or one before 5."""
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("transformers")
        return version if int(version.partition(".")[0]) >= 5 else ""
    return ""


def check(path: Path, folder: Path) -> None:
    """Raise CodeError if a file, or one of `folder` that it imports, uses what version 5 ignores.

    Not reported: code under a condition on the version or on hasattr, fallbacks for exceptions such
    as ImportError, names that the files define, and arguments of other libraries' functions.
    """
    files: dict[Path, ast.Module] = {}  # The file and those that it imports.
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in files or not file.is_file() or file.suffix.lower() != ".py":
            continue
        files[file] = ast.Module([], [])
        # The import reports what cannot be parsed.
        with suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            files[file] = ast.parse(file.read_bytes())
        for name, _ in imports(files[file]):
            # A name may be a module, or be defined in one.
            for dotted in filter(None, (name.strip("."), name.strip(".").rpartition(".")[0])):
                for root in (folder, file.parent):
                    location = root.joinpath(*dotted.split("."))
                    waiting += [location.with_name(f"{location.name}.py"), location / "__init__.py"]
    imported = [name for tree in files.values() for name, _ in imports(tree)]
    if not any(name.startswith("transformers") for name in imported) or not installed():
        return
    defined = set()  # The names of functions, parameters and annotated fields.
    for node in (node for tree in files.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
    uses = []
    for file, tree in files.items():
        # The variables that hold a part of a library other than transformers.
        foreign = set()
        for name, variable in imports(tree):
            package = name.partition(".")[0]
            paths = [
                root / f"{package}{end}" for root in (folder, file.parent) for end in ("", ".py")
            ]
            if package not in ("", "transformers") and not any(map(Path.exists, paths)):
                foreign.add(variable)
        uses += [
            f"{file}, line {line}: {what}"
            for line, name, what in sorted(_uses(tree, foreign))
            if name not in defined
        ]
    if uses:
        raise CodeError(
            f"Code for transformers 4, and {installed()} is installed. {' '.join(uses)}",
            f"Change these lines, or {IMAGE}.",
        )


def remedy(text: str) -> str:
    """Return what to do about an error that names what transformers lacks or refuses, or ""."""
    if match := re.search(r"Repo id must be.*?'([^']+)/([\w.-]+\.(?:bin|safetensors|pt))'", text):
        return f"from_pretrained takes the folder {match[1]}, not its file {match[2]}."
    for path, pattern in enumerate(_RAISED):
        match = re.search(pattern, text.strip().strip("'\""))
        name = match.group(1) if match else ""
        instead = REMOVED.get(name, IGNORED.get(name))
        if name and (instead is not None or path < _ALWAYS) and installed():
            image = "" if name in NOT_IN_4 else f"if the code was written for version 4, {IMAGE}"
            advice = "; or ".join(part for part in (instead, image) if part)
            return f"transformers {installed()} is installed, which has no {name}: {advice}."
    return ""


def remedy_of(error: BaseException) -> str:
    """Return `remedy` of an exception, with the file and line of the user's code that raised it.

    An AttributeError of version 5 without a text: a chat template's result is used as a tensor.
    """
    advice = remedy(str(error))
    frames = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, AttributeError) and not str(error) and installed() and frames:
        code = frames[-1][0].f_code
        if code.co_name == "__getattr__" and "tokenization_utils" in code.co_filename:
            advice = f"{_TEMPLATE_CHANGE}; or {IMAGE}."
    libraries = tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    libraries += (str(Path(__file__).parents[1]),)
    for frame, line in reversed(frames) if advice else ():
        if not (file := frame.f_code.co_filename).startswith((*libraries, "<")):
            return f"{file}, line {line}: {advice}"
    return advice


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each import, and the variable that it binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield f"{module}.{alias.name}", alias.asname or alias.name


def _uses(tree: ast.AST, foreign: set[str]) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and description of each use of what version 5 ignores or changes."""
    nodes = list(ast.walk(tree))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    names += [node.name for node in nodes if isinstance(node, ast.alias)]
    loads_encoder_decoder = any(re.fullmatch(_ENCODER_DECODER, name) for name in names)
    pads_sources = loads_encoder_decoder and any(
        isinstance(node, ast.keyword)
        and node.arg == "padding"
        # The padding of a convolution is a number.
        and not (isinstance(node.value, ast.Constant) and repr(node.value.value) not in _PADS)
        for node in nodes
    )
    values = (getattr(node, "value", None) for node in nodes if _takes_dict(node))
    as_dict = {value.id for value in values if isinstance(value, ast.Name)}
    for node, parents in _unguarded(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "return_all_scores":
                    yield from _ignored(str(key.value), value)
        if not isinstance(node, ast.Call):
            continue
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else method
        called = node.func
        while isinstance(called, ast.Attribute):
            called = called.value
        is_foreign = isinstance(called, ast.Name) and called.id in foreign and name != "pipeline"
        # Tokenizers, models and pipelines are called as objects; a class may be of another library.
        if not is_foreign and (not name[:1].isupper() or name.endswith("Pipeline")):
            for keyword in node.keywords:
                yield from _ignored(keyword.arg or "", keyword.value)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if method == _TEMPLATE and not {"return_dict", None} & given.keys():
            tokenize = given.get("tokenize")
            is_text = isinstance(tokenize, ast.Constant) and not tokenize.value
            if not is_text and not _is_dict(node, parents, as_dict):
                yield node.lineno, method, f"{_TEMPLATE_CHANGE}."
        if method == "generate" and pads_sources and _MASK not in given:
            inputs = [*node.args[:1], given.get("inputs"), given.get("input_ids")]
            if any("ids" in ast.unparse(value) for value in inputs if value is not None):
                yield node.lineno, _MASK, f"{_MASK_CHANGE}."
        if re.fullmatch(_REBUILT, name):
            for keyword in node.keywords:
                if keyword.arg in _VOCABULARIES:
                    what = (
                        f"{name} ignores {keyword.arg}, so that all words are unknown: give the"
                        " path as its first argument, without the name, or use from_pretrained."
                    )
                    yield node.lineno, keyword.arg, what


def _ignored(name: str, value: ast.expr) -> Iterator[tuple[int, str, str]]:
    """Yield an argument that version 5 ignores, unless its value may be the default."""
    is_on = value.value is True if isinstance(value, ast.Constant) else name != "multi_class"
    if name in IGNORED and is_on:
        yield value.lineno, name, f"{name} has no effect: {IGNORED[name]}."


def _takes_dict(node: ast.AST) -> bool:
    """Return whether a node uses its value as a dict of tensors: `**value`, `value["name"]`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    if isinstance(node, ast.Attribute):
        return node.attr in _TENSORS
    return isinstance(node, ast.keyword) and node.arg is None


def _is_dict(call: ast.AST, parents: list[ast.AST], as_dict: set[str]) -> bool:
    """Return whether a call's result is used as a dict, also by one of the variables `as_dict`."""
    node = call
    for parent in reversed(parents):
        if _takes_dict(parent):
            return True
        if isinstance(parent, ast.Assign):
            return any(isinstance(to, ast.Name) and to.id in as_dict for to in parent.targets)
        is_moved = isinstance(parent, ast.Attribute) and parent.attr in ("to", "cuda")
        if not is_moved and not (isinstance(parent, ast.Call) and parent.func is node):
            return False
        node = parent
    return False


def _unguarded(tree: ast.AST) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Yield each node with its parents, without code that depends on the version."""
    waiting: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    while waiting:
        node, parents = waiting.pop()
        yield node, parents
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.If, ast.IfExp)) and re.search(
            "version|hasattr", ast.unparse(node.test)
        ):
            children = []
        if isinstance(node, ast.Try):
            caught = " ".join(
                ast.unparse(handler.type) for handler in node.handlers if handler.type
            )
            if re.search(r"\b(Import|Attribute|Key|Type)Error\b", caught):
                # What version 5 ignores raises nothing, so that the handlers do not run.
                children = [*node.body, *node.orelse, *node.finalbody]
        waiting += [(child, [*parents, node]) for child in children]
