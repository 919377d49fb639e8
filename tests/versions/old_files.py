"""Inference files as public repositories have them, written for transformers 4.

    python old_files.py FOLDER      loads each file as a worker does, sends it one request, and
                                    prints what came of it as a JSON line

The models are random and tiny. A file names its model's class, and what an error under transformers
5 says ("" if it is served there as well).
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOADS = """
    import json, torch
    from transformers import AutoTokenizer, {auto}
    def model_fn(model_dir):
        return {auto}.from_pretrained(model_dir).eval(), AutoTokenizer.from_pretrained(model_dir)
"""
CLASSIFIER = LOADS.format(auto="AutoModelForSequenceClassification")
WRITER = LOADS.format(auto="AutoModelForCausalLM")
READS = """
    def input_fn(request_body, request_content_type):
        assert request_content_type == "application/json"
        return json.loads(request_body)["inputs"]
    def output_fn(prediction, accept):
        return json.dumps(prediction), accept
"""
PIPELINE = """
    from transformers import pipeline
    def model_fn(model_dir):
        return pipeline({arguments})
"""
CHAT = """
    TEMPLATE = "{{% for message in messages %}}{{{{ message['content'] }}}} {{% endfor %}}"
    def predict_fn(data, model_and_tokenizer):
        model, tokenizer = model_and_tokenizer
        messages = [{{"role": "user", "content": data}}]
        inputs = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, {arguments})
        {rest}
"""
BERT, GPT2, T5 = "BertForSequenceClassification", "GPT2LMHeadModel", "T5ForConditionalGeneration"


def classify(line: str) -> str:
    """A file that makes tokens by this line and classifies them."""
    return f"""{CLASSIFIER}{READS}
    def predict_fn(data, model):
        model, tokenizer = model
        {line}
        with torch.no_grad():
            logits = model(encoded["input_ids"], attention_mask=encoded["attention_mask"])[0]
        return torch.softmax(logits, dim=-1).tolist()
"""


def pipe(arguments: str, predict: str = "") -> str:
    """A file with a pipeline, which may have a predict_fn of its own."""
    code = PIPELINE.format(arguments=arguments)
    return code + (f"    def predict_fn(data, model):\n        {predict}\n" if predict else "")


def chat(arguments: str, rest: str) -> str:
    """A file that writes an answer to a conversation."""
    return WRITER + READS + CHAT.format(arguments=arguments, rest=rest)


GENERATES = "return model.generate(inputs, max_new_tokens=2)[0].tolist()"
UNPACKS = "return model.generate(**inputs, max_new_tokens=2)[0].tolist()"
FILES: list[tuple[str, str, str]] = [
    (BERT, pipe("'text-classification', model=model_dir"), ""),
    (BERT, pipe("'text-classification', model=model_dir, return_all_scores=True"), "top_k=None"),
    (BERT, pipe("'text-classification', model=model_dir", "return model(data['inputs'], return_all_scores=True)"),
     "top_k=None"),
    (BERT, pipe("'text-classification', model=model_dir, tokenizer=model_dir", "return model(data.pop('inputs', data), truncation=True)"),
     ""),
    (BERT, pipe("'zero-shot-classification', model=model_dir", "return model(data['inputs'], ['a', 'b'], multi_class=True)['scores']"),
     "multi_label"),
    (BERT, pipe("'zero-shot-classification', model=model_dir", "return model(data['inputs'], ['a', 'b'], multi_label=True)['scores']"),
     ""),
    ("BertForTokenClassification", pipe("'ner', model=model_dir, grouped_entities=True", "return [str(e) for e in model(data['inputs'])]"),
     "aggregation_strategy"),
    ("BertForTokenClassification", pipe("'ner', model=model_dir, aggregation_strategy='simple'"), ""),
    ("BertForQuestionAnswering", pipe("'question-answering', model=model_dir", "return model(question='who', context=data['inputs'])"),
     "HF_TASK"),
    (T5, pipe("'summarization', model=model_dir", "return model(data['inputs'], max_new_tokens=3)"), "HF_TASK"),
    (T5, pipe("'translation_en_to_de', model=model_dir", "return model(data['inputs'], max_new_tokens=3)"), "HF_TASK"),
    (T5, "    from transformers import Text2TextGenerationPipeline\n" + LOADS.format(auto="AutoModelForSeq2SeqLM")
     + "    def predict_fn(data, m):\n        return Text2TextGenerationPipeline(*m, max_new_tokens=3)(data['inputs'])\n", "HF_TASK"),
    (T5, LOADS.format(auto="AutoModelForSeq2SeqLM") + READS + """
    def predict_fn(data, m):
        ids = m[1](data, return_tensors="pt").input_ids
        return m[1].batch_decode(m[0].generate(ids, max_new_tokens=3), skip_special_tokens=True)
""", ""),
    (T5, LOADS.format(auto="AutoModelForSeq2SeqLM") + READS + """
    def predict_fn(data, m):
        ids = m[1]([data, data + data], padding=True, return_tensors="pt").input_ids
        return m[1].batch_decode(m[0].generate(ids, max_new_tokens=3), skip_special_tokens=True)
""", "attention_mask"),
    ("BertForMaskedLM", pipe("'fill-mask', model=model_dir", "return model('the [MASK]', top_k=2)"), ""),
    (GPT2, pipe("'text-generation', model=model_dir", "return model(data['inputs'], max_new_tokens=2)"), ""),
    (GPT2, LOADS.format(auto="AutoModelWithLMHead") + READS + """
    def predict_fn(data, m):
        return m[1].decode(m[0].generate(m[1].encode(data, return_tensors="pt"), max_new_tokens=2)[0])
""", "AutoModelForCausalLM"),
    (GPT2, WRITER + READS + """
    def predict_fn(data, m):
        return m[1].decode(m[0].generate(m[1].encode(data, return_tensors="pt"), max_new_tokens=2)[0])
""", ""),
    (GPT2, chat('return_tensors="pt"', GENERATES), "return_dict"),
    (GPT2, chat('return_tensors="pt"', "return [inputs.shape[-1]]"), "return_dict"),
    (GPT2, chat("tokenize=True", "return len(inputs)"), "return_dict"),
    (GPT2, chat('return_tensors="pt", return_dict=False', GENERATES), ""),
    (GPT2, chat('return_tensors="pt", return_dict=True', "inputs.pop('token_type_ids', 0)\n        " + UNPACKS), ""),
    (GPT2, chat("tokenize=False", "return inputs"), ""),
    (BERT, classify('encoded = tokenizer.encode_plus(data, return_tensors="pt")'), "tokenizer(text"),
    (BERT, classify('encoded = tokenizer.batch_encode_plus([data], return_tensors="pt")'), "tokenizer(texts"),
    (BERT, classify('encoded = tokenizer([data], padding=True, return_tensors="pt")'), ""),
    (BERT, CLASSIFIER + """
    def transform_fn(model, data, content_type, accept):
        encoded = model[1](json.loads(data)["inputs"], return_tensors="pt")
        return json.dumps(model[0](**encoded).logits.tolist()), accept
""", ""),
    (BERT, CLASSIFIER + READS + """
    def predict_fn(data, model):
        ids = model[1].build_inputs_with_special_tokens(model[1].encode(data, add_special_tokens=False))
        return model[0](torch.tensor([ids])).logits.tolist()
""", "tokenizer(text"),
    (BERT, CLASSIFIER + READS + """
    def predict_fn(data, model):
        heads = torch.ones(2, 2)
        return model[0](**model[1](data, return_tensors="pt"), head_mask=heads).logits.tolist()
""", "head_mask"),
    ("BertModel", pipe("'feature-extraction', model=model_dir", "return model(data['inputs'])[0][0]"), ""),
]  # fmt: skip


def make_models(folder: Path) -> None:
    from tests.support.serving_kit import save

    for kind in {kind for kind, _, _ in FILES}:
        labels = {"num_labels": 3} if kind.endswith("Classification") else {}
        save(kind, folder / kind, **labels)


def outcome(folder: Path, number: int, kind: str, code: str) -> str:
    """The answer's first characters, or the error."""
    from tests.support.worker_front import ask, load_runner, write_code

    model = write_code(folder / str(number), {"code/inference.py": code})
    for file in (folder / kind).iterdir():
        (model / file.name).symlink_to(file)
    try:
        answer, *_ = ask(load_runner(model), b'{"inputs": "the film was good"}')
        json.loads(answer)
        return f"answer: {answer[:60]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT), str(ROOT / "code"), str(ROOT / "container")]
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.utils.logging.set_verbosity_error()
    folder = Path(sys.argv[1])
    make_models(folder)
    results: list[Any] = []
    for number, (kind, code, _) in enumerate(FILES):
        begin = time.monotonic()
        results.append(outcome(folder, number, kind, code))
        sys.modules.pop("inference", None)
        print(number, results[-1], round(time.monotonic() - begin, 2), file=sys.stderr)
    print(json.dumps({"transformers": transformers.__version__, "outcomes": results}))


if __name__ == "__main__":
    main()
