"""What transformers 5 ignores is found in a user's files before they run."""

import inspect
import re
import textwrap
from pathlib import Path

import pytest

from amphora.common import transformers4
from amphora.common.errors import CodeError

HEAD = "from transformers import pipeline, AutoTokenizer\n"
GENERATE = """
    def predict_fn(data, model):
        model, tok = model
        ids = tok.apply_chat_template(data, return_tensors="pt"{more}){moved}
        return model.generate({star}ids, max_new_tokens=4)
"""
SUMMARIES = """
    from transformers import AutoModelForSeq2SeqLM
    def predict_fn(data, model):
        model, tok = model
        encoded = tok(data, {more}return_tensors="pt")
        return model.generate({arguments})
"""


def check(folder: Path, code: str, **others: str) -> str:
    """The error's text; "" if the file is left alone."""
    for name, text in {"inference": HEAD + textwrap.dedent(code), **others}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    try:
        transformers4.check(folder / "inference.py", folder)
    except CodeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("code", "line", "words"),
    [
        ("p = pipeline('text-classification', return_all_scores=True)", 2, ["top_k=None"]),
        ("def predict_fn(d, m):\n  return m(d, return_all_scores=True)", 3, ["top_k=None"]),
        ("options = {'return_all_scores': True}", 2, ["return_all_scores", "top_k=None"]),
        ("def f(m, all):\n  return m('a', return_all_scores=all)", 3, ["top_k=None"]),
        ("try:\n  a = p('a', return_all_scores=True)\nexcept TypeError:\n  a = p('a', top_k=None)", 3,
         ["top_k=None"]),
        ("from optimum.pipelines import pipeline\np = pipeline('x', return_all_scores=True)", 3,
         ["top_k=None"]),
        ("def f(t): return t('a', pad_to_max_length=True)", 2, ['padding="max_length"']),
        ("x = '\\d'  # warned of\ndef f(t): return t('a', pad_to_max_length=True)", 3, ["padding"]),
        ("def f(p): return p('a', ['b'], multi_class=True)", 2, ["multi_label"]),
        ("def f(m, i): return m(i, head_mask=make())", 2, ["head_mask"]),
        (GENERATE.format(more="", moved="", star=""), 5, ["return_dict=False"]),
        (GENERATE.format(more="", moved=".to('cpu')", star=""), 5, ["return_dict=False"]),
        ("def f(m, t): return m.generate(t.apply_chat_template([], return_tensors='pt'))", 2,
         ["return_dict"]),
        ("def count(t, m): return len(t.apply_chat_template(m))", 2, ["return_dict"]),
        ("from transformers import BertTokenizer as B, BertTokenizer\nt = BertTokenizer(vocab_file='v')",
         3, ["BertTokenizer ignores vocab_file", "from_pretrained"]),
        (SUMMARIES.format(more="padding=True, ", arguments="encoded.input_ids, max_length=9"), 7,
         ["attention_mask=encoded['attention_mask']"]),
        (SUMMARIES.format(more="padding='longest', ", arguments="inputs=encoded.input_ids, **data"),
         7, ["generate(**encoded)"]),
    ],
)  # fmt: skip
def test_a_use_is_named_with_its_line_and_both_remedies(
    code: str, line: int, words: list[str], tmp_path: Path
) -> None:
    message = check(tmp_path, code)
    for word in [f"{tmp_path}/inference.py, line {line}: ", "--transformers 4", *words]:
        assert word in message


@pytest.mark.parametrize(
    "code",
    [
        "p = pipeline('text-classification', top_k=None, return_all_scores=False)",
        "from sklearn.linear_model import LogisticRegression as L\nL(multi_class='ovr')",
        "class T:\n  def score(self, pad_to_max_length): pass\n\nT().score(pad_to_max_length=True)",
        "def f(m, head_mask=None): return m(head_mask=head_mask)",
        "def f(t): return t.apply_chat_template([], tokenize=False)",
        "def f(m, t): return m.generate(**t.apply_chat_template([], return_tensors='pt'))",
        "def f(m, t): return m(t.apply_chat_template([], return_tensors='pt')['input_ids'])",
        "def f(m, t): return m(t.apply_chat_template([], return_tensors='pt').to(0).input_ids)",
        GENERATE.format(more=", return_dict=False", moved="", star=""),
        GENERATE.format(more=", return_dict=True", moved="", star="**"),
        GENERATE.format(more="", moved=".to('cpu')", star="**"),
        "try:\n  x = p('a', top_k=None)\nexcept TypeError:\n  x = p('a', return_all_scores=True)",
        "import transformers\nif transformers.__version__ < '5':\n  x = p('a', return_all_scores=True)",
        "x = t('a', pad_to_max_length=True) if hasattr(t, 'encode_plus') else t('a')",
        "def f(y, p, how): return roc_auc_score(y, p, multi_class=how)",
        "class Arguments:\n  pad_to_max_length: bool = False\n\nArguments(pad_to_max_length=True)",
        "def f(args): return args.additional_special_tokens",
        "from another.library import Encoder\nEncoder(pad_to_max_length=True)",
        "from another.library import collate as f\nf(pad_to_max_length=True)",
        "import another.library\nanother.library.evaluate(multi_class=True)",
        "import another.library as a\na.Layer.apply(head_mask=a.mask)",
        SUMMARIES.format(more="padding=True, ", arguments="encoded.input_features").replace(
            "AutoModelForSeq2SeqLM", "WhisperForConditionalGeneration"
        ),
        SUMMARIES.format(more="", arguments="encoded.input_ids, max_length=9"),
        SUMMARIES.format(more="", arguments="encoded.input_ids")
        + "\n    Conv1d(1, 1, 3, padding=1)",
        "t = BertTokenizer('vocab.txt')\nc = Config(vocab_file='vocab.txt')",
        SUMMARIES.format(more="padding=False, ", arguments="encoded.input_ids"),
        SUMMARIES.format(more="padding=True, ", arguments="**encoded"),
        SUMMARIES.format(
            more="padding=True, ", arguments="encoded.input_ids, attention_mask=encoded[1]"
        ),
        SUMMARIES.format(more="padding=True, ", arguments="encoded.input_ids").replace(
            "Seq2SeqLM", "CausalLM"
        ),
    ],
)
def test_what_5_does_as_well_is_left_alone(code: str, tmp_path: Path) -> None:
    assert check(tmp_path, code) == ""


def test_files_that_the_file_imports_are_read_if_transformers_5_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "def f(t): return t('a', pad_to_max_length=True)"
    assert check(tmp_path, "import json", train=old) == ""
    message = check(
        tmp_path, "def f():\n  from helpers import p\n  p(multi_class=True)", helpers=old
    )
    assert f"{tmp_path}/helpers.py, line 1: pad_to_max_length" in message
    assert f"{tmp_path}/inference.py, line 4: multi_class" in message
    (tmp_path / "own.py").write_text("def f(t): return t('a', pad_to_max_length=True)")
    transformers4.check(tmp_path / "own.py", tmp_path)
    monkeypatch.setattr(transformers4, "installed", lambda: "")
    assert check(tmp_path, "def f(t): return t('a', pad_to_max_length=True)") == ""
    assert transformers4.remedy("cannot import name 'AdamW' from 'transformers'") == ""


def test_the_tables_hold_for_the_installed_version() -> None:
    """Each entry is gone: one that came back would refuse a file that works."""
    import transformers
    from transformers.pipelines import PIPELINE_REGISTRY

    assert transformers4.installed() == transformers.__version__
    known = set(dir(transformers)) | set(dir(transformers.TrainingArguments))
    known |= {*PIPELINE_REGISTRY.supported_tasks, *dir(transformers.PreTrainedTokenizerFast)}
    assert not transformers4.REMOVED.keys() & known
    rebuilt = [name for name in dir(transformers) if re.fullmatch(transformers4._REBUILT, name)]
    readers = [inspect.signature(getattr(transformers, name).__init__) for name in rebuilt]
    assert len(rebuilt) > 20
    assert not [reader for reader in readers if "vocab_file" in reader.parameters]


@pytest.mark.parametrize(
    ("raised", "words", "has_image"),
    [
        ("from transformers import AdamW", ["no AdamW", "torch.optim"], False),
        ("from transformers import AutoModelWithLMHead", ["AutoModelForCausalLM"], True),
        ("import transformers; transformers.TextDataset", ["no TextDataset", "datasets"], True),
        ("import transformers.modeling_tf_utils", ["no modeling_tf_utils"], True),
        ("from transformers import pipeline; pipeline('summarization')", ["HF_TASK"], True),
        ("from transformers import pipeline; pipeline('translation_a_to_b')", ["HF_TASK"], True),
        ("from transformers import TFBertModel", ["no TFBertModel"], True),
        (
            "import transformers as t; t.TrainingArguments('x', evaluation_strategy='epoch')",
            ["eval_strategy"],
            True,
        ),
        ("import transformers as t; t.Trainer(tokenizer=1)", ["processing_class"], True),
        ("import transformers as t; t.TrainingArguments('x', past_index=1)", ["past_index"], True),
        (
            "import tokenizers, transformers as t; t.PreTrainedTokenizerFast(tokenizer_object="
            "tokenizers.Tokenizer(tokenizers.models.BPE())).encode_plus('a')",
            ["no encode_plus", "tokenizer(text"],
            True,
        ),
        (
            "import torch; torch.nn.Linear(1, 1).to_bettertransformer()",
            ["no to_bettertransformer", "leave it out"],
            True,
        ),
        ("import nothing_of_ours", [], False),
        ("[].encode", [], False),
        ("dict(a=1).get(b=2)", [], False),
    ],
)
def test_an_error_of_transformers_5_has_its_remedy(
    raised: str, words: list[str], has_image: bool
) -> None:
    with pytest.raises((ImportError, AttributeError, KeyError, TypeError)) as caught:
        exec(raised, {})
    message = transformers4.remedy_of(caught.value)
    assert ("--transformers 4" in message) == has_image
    assert bool(message) == bool(words)
    for word in words:
        assert word in message
