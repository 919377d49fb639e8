"""What a model's generation_config.json says, against transformers' own generate for each text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.serving_kit import Handlers, save

TEXTS = ["the film was good", "anna said", "who"]
NEW = 8
BODY = {"inputs": TEXTS, "parameters": {"max_new_tokens": NEW, "return_full_text": False}}


def model_with(base: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(base, folder)
    config = json.loads((base / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, **settings}))
    return folder


def transformers_texts(folder: Path, **options: Any) -> list[str]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            output = model.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, tokenizer=tokenizer, **options
            )
        ids = output[0] if isinstance(output, torch.Tensor) else output.sequences[0]
        # What the tokens add to the prompt: decoded alone, they would keep the ## of WordPiece.
        prompt, whole = (
            tokenizer.decode(part, skip_special_tokens=True)
            for part in (inputs["input_ids"][0], ids)
        )
        texts.append(whole.removeprefix(prompt))
    return texts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("LlamaForCausalLM", tmp_path_factory.mktemp("base"))


def texts_of(answer: list[Any]) -> list[str]:
    return [str(entry["generated_text"]) for (entry,) in answer]


@pytest.mark.parametrize(
    "settings",
    [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"token_healing": True}],
    ids=lambda value: next(iter(value)),
)
def test_what_makes_steps_of_several_tokens_loses_none(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    answer = Handlers(model_with(base, tmp_path / "model", **settings)).ask(BODY)
    assert texts_of(answer) == transformers_texts(base)


def test_a_models_own_stop_strings_end_its_texts(base: Path, tmp_path: Path) -> None:
    whole = transformers_texts(base)
    stop = [whole[0][3:6], whole[1][2:5]]
    folder = model_with(base, tmp_path / "model", stop_strings=stop)
    expected = transformers_texts(folder)
    assert expected != whole
    assert texts_of(Handlers(folder).ask(BODY)) == expected


def test_a_model_that_asks_for_more_outputs_still_gives_texts(base: Path, tmp_path: Path) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    answer = Handlers(model_with(base, tmp_path / "model", **more)).ask(BODY)
    assert texts_of(answer) == transformers_texts(base)
    plain = save("T5ForConditionalGeneration", tmp_path / "t5")
    body = {"inputs": TEXTS, "parameters": {"max_new_tokens": 6}}
    answer = Handlers(model_with(plain, tmp_path / "more", **more)).ask(body)
    assert answer == Handlers(plain).ask(body)
