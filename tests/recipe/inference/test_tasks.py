"""What is refused, at start and of a request; and the tasks that transformers' pipelines answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from amphora.serving.protocol.media_types import Fault
from recipe.backend import precision
from recipe.backend.requests.payloads import BadRequest
from recipe.errors import ModelError
from recipe.inference import registry
from recipe.models.sources.origin import Origin
from recipe.runtime.device import Device
from tests.support.serving_kit import TEXTS, Handlers, save, save_nllb, tokenizer

CLASSIFIER = "BertForSequenceClassification"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "changes", "environ", "words"),
    [
        (CLASSIFIER, "no tokenizer", {}, ["has no tokenizer", "tokenizer.json"]),
        (CLASSIFIER, "NaN", {}, ["1 weights", "NaN", "layer.1.output.dense.weight"]),
        ("BertForNextSentencePrediction", {}, {}, ["BertForNextSentencePrediction", "HF_TASK"]),
        ("BertModel", {"architectures": ["BertWithMyHead"]}, {}, ["BertWithMyHead", "HF_TASK", "fill-mask"]),
        ("BertModel", {"architectures": None}, {}, ["no architectures", "HF_TASK"]),
        ("BertModel", {}, {"HF_TASK": "fill-mask"}, ["lacks", "weights"]),
        (CLASSIFIER, {}, {"HF_TASK": "zero-shot-classification"},
         ["entailment", "LABEL_0"]),
        ("GPT2LMHeadModel", {}, {"HF_TASK": "summarization"}, ["of type .gpt2., of which transformers has no AutoModelForSeq2SeqLM"]),
        (CLASSIFIER, {"id2label": {"0": "a", "1": "b", "2": "c"}}, {},
         ["config.json .id2label.* contradicts the shapes"]),
        (CLASSIFIER, "cut", {}, ["weights are cut off or damaged"]),
        (CLASSIFIER, "pointer", {},
         ["pointers of Git LFS instead of files: model.safetensors.*git lfs pull"]),
        (CLASSIFIER, {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}, {},
         ["HF_TRUST_REMOTE_CODE=true for a server"]),
        ("BertForMaskedLM", "sparse", {}, ["SparseEncoder", "inference.py"]),
        (CLASSIFIER, {"num_labels": 1, "sentence_transformers": {"activation_fn": "somebody.Activation"}}, {}, ["somebody.Activation", "Sigmoid"]),
        ("BertModel", {}, {"AMPHORA_ANSWERS": "both"}, ["'both'", "huggingface or vectors"]),
        ("BertModel", {}, {"HF_TASK": "table-question-answering"}, ["is a BertModel, which table-question-answering"]),
        ("BertModel", {}, {"HF_TASK": "fill-masks"}, ["'fill-masks'", "mean fill-mask"]),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_right_is_refused_at_start(
    kind: str, changes: Any, environ: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    in_library = changes if "sentence_transformers" in changes else {}
    folder = save(kind, tmp_path / "model", **in_library)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if isinstance(changes, dict):
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    elif changes == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    elif changes == "NaN":
        tensors = load_file(weights)
        tensors["bert.encoder.layer.1.output.dense.weight"][3, 4] = torch.nan
        save_file(tensors, weights, {"format": "pt"})
    elif changes == "cut":
        weights.write_bytes(weights.read_bytes()[:2000])
    elif changes == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    else:
        (folder / "modules.json").write_text('[{"idx": 0, "path": "", "type": "x"}, {"idx": 1}]')
        (folder / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    with pytest.raises(Exception, match=words[0]) as caught:
        Handlers(tmp_path / "model", **environ)
    for word in words[1:]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("LayoutLMv2ForQuestionAnswering", "document-question-answering"),
        ("BartForConditionalGeneration", "text2text-generation"),
        ("LlamaForCausalLM", "text-generation"),
        ("EncoderDecoderModel", "text2text-generation"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("CLIPModel", "zero-shot-image-classification"),
        ("LlavaForConditionalGeneration", "image-text-to-text"),
        ("BertModel", "feature-extraction"),
        ("T5EncoderModel", None),
        ("ViTModel", "image-feature-extraction"),
        ("BertForPreTraining", None),
        ("BertForMultipleChoice", "multiple-choice"),
    ],
)
def test_each_head_has_its_task(kind: str, task: str | None, tmp_path: Path) -> None:
    settings = {"model_type": "bert", "architectures": [kind]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    origin = Origin.find(str(tmp_path), {})
    if task is None:
        with pytest.raises(ModelError, match=kind):
            registry.task_of(origin)
    else:
        assert registry.task_of(origin) == task


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("sub/config.json", ["A model lies in", "/sub", "tar -C sub", "HF_MODEL_ID="]),
        ("model.pt", ["torch.jit.load", "code/inference.py"]),
        ("notes.txt", ["the log lists", "Pack the files that save_pretrained wrote"]),
    ],
)
def test_a_folder_without_a_model_is_named_for_what_it_holds(
    file: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=r"no config\.json") as caught:
        Origin.find(str(tmp_path), {})
    for word in words:
        assert word in str(caught.value)


def test_what_a_request_may_not_hold_is_told(tmp_path: Path) -> None:
    served = Handlers(save(CLASSIFIER, tmp_path / "model", num_labels=3))
    long = "the film was good " * 30
    for body, words in [
        ({"inputs": "a", "stream": True}, "'stream' is not one of text-classification, which takes"),
        ({"inputs": "a", "foo": 1}, "'foo'"), ({"text": "a", "label": 2}, "'label'"),
        ({"inputs": "a", "top_k": 2, "parameters": {"top_k": 3}}, "twice"),
        ({"inputs": "a", "top_k": 0}, "top_k is 0"), ({"inputs": "a", "top_k": 1.5}, "top_k is 1.5"),
        ({"inputs": "a", "parameters": {"function_to_apply": "tanh"}}, "sigmoid, softmax, none or"),
        ({"question": "a", "choices": ["b"]}, "'choices'"),
        ({"query": "a", "texts": ["b"]}, "3 labels"), ({"inputs": [["a", "b", "c"]]}, "not an object"),
        ({"inputs": {"text": ["a"], "text_pair": ["b"]}}, "text or text and text_pair"),
        ({"inputs": [{"text": "a", "id": 3}]}, "not an object"), ({"inputs": 3}, "not a text"),
        ({"inputs": {"text": "a", "Text": "b"}}, "not an object"),
        ({"inputs": long, "truncation": False}, "longer than the 48 tokens"),
        ({"inputs": "a", "options": {"wait": True}}, "'options'"),
        (b'{"inputs": "a", "top_k": NaN}', "NaN"), (b'{"inputs": "\\ud800"}', "surrogate"),
        ((b"\\x89PNG", "image/png"), "not files"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            served.ask(body)
    best = served.ask({"inputs": "a", "options": {"wait_for_model": True}, "parameters": None})
    assert list(best[0]) == ["label", "score"]
    # A line that is none of the task's is its own fault.
    lines = b'{"inputs": "a"}\n{"inputs": {"context": "b"}}\n{"text": "a", "text_pair": "b"}\n'
    answers = served.ask((lines, "application/jsonlines"))
    assert [list(entry) for entry in answers] == [["label", "score"], ["error"], ["label", "score"]]
    rows = b"id,text,text_pair\n1,a,b\n"
    assert served.ask((rows, "text/csv")) == served.ask([["a", "b"]])
    with pytest.raises(Fault, match="CSV has no header"):
        served.ask({"inputs": ["a"]}, "text/csv; header=present")
    some = {"inputs": ["a", long], "parameters": {"max_length": 8}}
    assert len(served.ask(some)) == 2


@pytest.fixture(scope="module")
def entailing(tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    numbers = {name: number for number, name in names.items()}
    folder = tmp_path_factory.mktemp("entailing")
    save(CLASSIFIER, folder, id2label=names, label2id=numbers)
    return Handlers(folder, HF_TASK="zero-shot-classification")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        # Left out, the score of "film" would be that of the only label.
        ({"candidate_labels": ["film", ""]}, r"candidate_labels\[1\] is ''"),
        ({"candidate_labels": ", ,"}, "names no label"),
        ({"candidate_labels": 5}, r"Give a text or a list of texts\.$"),
        ({"hypothesis_template": "{} {0}"}, r"\{0\} in several places"),
    ],
)
def test_labels_of_a_request_are_all_asked(
    parameters: dict[str, Any], words: str, entailing: Handlers
) -> None:
    requested = {"candidate_labels": ["film", "paris"], **parameters}
    with pytest.raises(ValueError, match=words):
        entailing.ask({"inputs": "the film", "parameters": requested})
    several = {"candidate_labels": "film,, paris,", "hypothesis_template": "{0} {0}"}
    answer = entailing.ask({"inputs": "the film", "parameters": several})
    assert sorted(answer["labels"]) == ["film", "paris"]


@pytest.mark.parametrize("requested", [{}, {"num_beams": 3}])
def test_a_text_of_scores_that_are_no_numbers_is_an_error_of_its_own(
    requested: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that exceeds float16's range, whose likeliest token would be the first one."""
    served = Handlers(save("T5ForConditionalGeneration", tmp_path / "model"))
    model = served.model.loaded.model
    good = {"inputs": "the film", "parameters": {"max_new_tokens": 5, "num_beams": 1, **requested}}
    bad = {**good, "inputs": "anna said paris was bad again ."}
    expected = served.ask(good)
    forward = model.forward

    def exceed(**inputs: Any) -> Any:
        output = forward(**inputs)
        lengths = inputs["attention_mask"].sum(-1) if "attention_mask" in inputs else None
        if lengths is not None:
            output.logits[lengths > 5] = float("nan")
        return output

    monkeypatch.setattr(model, "forward", exceed)
    with pytest.raises(ArithmeticError, match="AMPHORA_DTYPE=float32"):
        served.ask(bad)
    assert served.ask(good) == expected


def test_a_model_of_several_languages_is_told_which(tmp_path: Path) -> None:
    save_nllb(tmp_path / "m")
    served = Handlers(tmp_path / "m", HF_TASK="translation")
    assert served.model.example("a").parameters["tgt_lang"].endswith("_Latn")
    with pytest.raises(BadRequest, match="tgt_lang"):
        served.ask({"inputs": "the film"})
    with pytest.raises(BadRequest, match="'klingon'"):
        served.ask({"inputs": "the film", "tgt_lang": "klingon"})
    model: Any = served.model
    bodies, wanted = [], []
    for source, target in [
        ("eng_Latn", "fra_Latn"),
        ("deu_Latn", "eng_Latn"),
        ("fra_Latn", "deu_Latn"),
    ]:
        options = {"max_new_tokens": 5, "num_beams": 2}
        model.loaded.tokenizer.src_lang = source
        encoded = model.loaded.tokenizer("the film was good", return_tensors="pt")
        encoded.pop("token_type_ids", None)
        bos = model.loaded.tokenizer.convert_tokens_to_ids(target)
        with torch.inference_mode():
            output = model.loaded.model.generate(**encoded, forced_bos_token_id=bos, **options)
        wanted.append(model.loaded.tokenizer.batch_decode(output, skip_special_tokens=True))
        bodies.append(
            {"inputs": "the film was good", "src_lang": source, "tgt_lang": target, **options}
        )
    answers = served.ask_all(bodies)
    assert [[entry["translation_text"] for entry in answer] for answer in answers] == wanted


def test_a_language_of_a_request_does_not_mark_the_next_one(tmp_path: Path) -> None:
    """PLBart's tokenizer marks no text unless a language is set."""
    save_nllb(tmp_path / "m")
    served = Handlers(tmp_path / "m", HF_TASK="translation")
    model: Any = served.model
    reader = model.loaded.tokenizer
    marks: list[str | None] = [None]
    src_lang = property(lambda _: marks[-1], lambda _, mark: marks.append(mark))
    members = {"src_lang": src_lang, "set_src_lang_special_tokens": lambda _, mark: None}
    reader.__class__ = type("Unmarked", (type(reader),), members)
    model.defaults["src_lang"] = None
    body = {"inputs": "the film", "tgt_lang": "fra_Latn", "max_new_tokens": 1}
    for more, mark in [({}, None), ({"src_lang": "deu_Latn"}, "deu_Latn"), ({}, None)]:
        served.ask({**body, **more})
        assert marks[-1] == mark


def test_rows_that_heed_no_mask_are_not_padded_together(tmp_path: Path) -> None:
    torch.manual_seed(6)
    reader = tokenizer()
    config = transformers.FNetConfig(
        vocab_size=len(reader), hidden_size=32, num_hidden_layers=2, intermediate_size=64,
        max_position_embeddings=48, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    model: Any = transformers.FNetForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "fnet")
    reader.save_pretrained(tmp_path / "fnet")
    served = Handlers(tmp_path / "fnet")
    assert served.model.loaded.padded.merging == "texts of one length"  # type: ignore[attr-defined]
    texts = [*TEXTS, TEXTS[0], "who was bad"]
    answers = served.ask({"inputs": texts, "top_k": None, "function_to_apply": "none"})
    for text, answer in zip(texts, answers, strict=True):
        encoded = reader(text, return_tensors="pt")
        encoded.pop("attention_mask")
        with torch.no_grad():
            logits = model(**encoded).logits[0]
        expected = sorted(logits.tolist(), reverse=True)
        assert [entry["score"] for entry in answer] == pytest.approx(expected, abs=1e-4)


def test_a_precision_is_computed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision.chosen({"AMPHORA_DTYPE": "float16"}) == ("cpu", "float16", torch.float16)
    gpu = Device(kind="cuda", bf16=False, reason="", processes=1, threads=None)
    monkeypatch.setattr(precision.device, "choose", lambda *_, **__: gpu)
    assert precision.chosen({"AMPHORA_DTYPE": "float16"})[0] == "cuda"
    with pytest.raises(ValueError, match="run `amphora quantize`"):
        precision.chosen({"AMPHORA_DTYPE": "int8"})
    with pytest.raises(ValueError, match=r"'int3'.*bfloat16"):
        precision.chosen({"AMPHORA_DTYPE": "int3"})


def test_a_pair_model_reads_its_own_columns_and_ranks_texts(tmp_path: Path) -> None:
    names = ["hypothesis", "premise"]  # in training the hypothesis was first
    folder = save(
        "BertForSequenceClassification", tmp_path / "model", num_labels=1, text_columns=names
    )
    served = Handlers(folder)
    first, second, *_ = TEXTS
    pair = {"text": first, "text_pair": second}
    (expected,) = served.ask([pair])
    rows = f'id,premise,hypothesis\n1,"{second}","{first}"\n2,x\n'.encode()
    answer, fault = served.ask((rows, "text/csv"))
    assert answer == expected
    assert "row 3" in fault["error"]["message"]
    for one, other in [names, ("sentence1", "sentence2"), ("Query", "Passage")]:
        assert served.ask({"inputs": [{other: second, one: first}]}) == [expected]
        csv = f'{other},{one}\n"{second}","{first}"\n'.encode()
        assert served.ask((csv, "text/csv")) == [expected]
    assert served.ask({"premise": second, "hypothesis": first}) == expected
    # As it stands, it is a cross-encoder too.
    ranked = served.ask({"query": first, "texts": TEXTS})
    scores = {entry["index"]: entry["score"] for entry in ranked}
    assert scores[1] == pytest.approx(expected["score"], abs=1e-6)
    for body in (b"premise,other\na,b\n", f"{first}\n{second}\n".encode()):
        with pytest.raises(ValueError, match=r"trained on|hypothesis and premise"):
            served.ask((body, "text/csv"))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"task": "translation", "class": "T5ForConditionalGeneration"}, "translation"),
        ({"task": "translation", "class": "BartForConditionalGeneration"}, "text2text-generation"),
        (
            {"task": "of another image", "class": "T5ForConditionalGeneration"},
            "text2text-generation",
        ),
        ("translation", "text2text-generation"),
    ],
)
def test_a_model_is_served_for_the_task_of_its_job_unless_another_class_was_trained_since(
    named: Any, expected: str, tmp_path: Path
) -> None:
    folder = save("T5ForConditionalGeneration", tmp_path / "m", trained_task=named)
    assert registry.chosen(Origin.find(str(folder), {}), {}) == expected
    environ = {"HF_TASK": "summarization"}
    assert registry.chosen(Origin.find(str(folder), environ), environ) == environ["HF_TASK"]


@pytest.mark.parametrize(
    ("kind", "task", "head"),
    [
        (CLASSIFIER, "token-classification", "text-classification"),
        (CLASSIFIER, "image-classification", "text-classification"),
        ("BertForTokenClassification", "text-classification", "token-classification"),
        (CLASSIFIER, "zero-shot-classification", ""),
        (CLASSIFIER, "feature-extraction", ""),
        (CLASSIFIER, "ner", "text-classification"),
        ("T5ForConditionalGeneration", "translation_en_to_de", ""),
    ],
)
def test_a_task_of_another_head_is_refused(kind: str, task: str, head: str, tmp_path: Path) -> None:
    environ = {"HF_TASK": task}
    origin = Origin.find(str(save(kind, tmp_path / "m")), environ)
    if not head:
        assert registry.chosen(origin, environ)
        return
    with pytest.raises(ModelError, match=f"names {kind}, the head of {head}. Leave HF_TASK out"):
        registry.chosen(origin, environ)
