"""Questions are answered as transformers 4.57's pipeline, the last one, answers them: with
`make test-versions`, since transformers 5 has none."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support.serving_kit import TEXTS, WORDS, Handlers, assert_close, save

ODD = ["München", "film-noir", "3.5", "(1999)", "O'Neil", "日本", "don't", "e\u0301te", "🙂", "\n"]


def asked_bodies() -> list[dict[str, Any]]:
    """Short contexts, and long ones that are read in parts, with all parameters in turn."""
    random = Random(1)

    def text(words: int) -> str:
        return " ".join(random.choice([*WORDS, *ODD]) for _ in range(words)).strip() or "who"

    bodies = []
    for number in range(50):
        is_long = number >= 40
        context = text(random.randint(40, 70) if is_long else random.randint(1, 18))
        parameters: dict[str, Any] = {"doc_stride": 4 + 2 * (number % 3)} if is_long else {}
        if number % 4 == 1:
            parameters["top_k"] = random.randint(2, 6)
        if number % 5 == 2:
            parameters["handle_impossible_answer"] = True
        if number % 6 == 3:
            parameters["max_answer_len"] = random.randint(1, 4)
        if number % 7 == 4:
            parameters["align_to_words"] = False
        if is_long and number % 3 == 0:
            parameters["max_seq_len"] = 32 + 8 * (number % 2)
        if is_long and number % 5 == 0:
            parameters["padding"] = "max_length"
        inputs = {"question": text(random.randint(1, 4)), "context": context}
        bodies.append({"inputs": inputs, "parameters": parameters})
    two = [
        {"question": "who", "context": "anna was good"},
        {"question": "in", "context": "paris ."},
    ]
    bodies += [
        {"inputs": two, "parameters": {}},
        {"inputs": two[:1], "parameters": {"top_k": 2}},
        {"inputs": {"question": "who", "context": "  anna   was\tgood  "}, "parameters": {"top_k": 3}},
        {"inputs": {"question": "is", "context": "good good Good GOOD good"}, "parameters": {"top_k": 4}},
        {"inputs": {"question": "who", "context": "a"}, "parameters": {"top_k": 10}},
    ]  # fmt: skip
    return bodies


@pytest.mark.versions
def test_answers_are_those_of_the_last_pipeline(tmp_path: Path) -> None:
    def save_byte_level(folder: Path) -> Path:
        """A model whose tokens are bytes of words, and which marks no part of a pair."""
        import torch
        from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForQuestionAnswering

        base: Any = Tokenizer(models.BPE())
        base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        base.decoder = decoders.ByteLevel()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        base.train_from_iterator(TEXTS * 3, trainer)
        base.post_processor = processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), add_prefix_space=False
        )
        reader: Any = PreTrainedTokenizerFast(
            tokenizer_object=base, bos_token="<s>", cls_token="<s>", pad_token="<pad>",
            eos_token="</s>", sep_token="</s>", unk_token="<unk>", mask_token="<mask>",
            model_max_length=512,
        )  # fmt: skip
        torch.manual_seed(3)
        config = RobertaConfig(
            vocab_size=len(reader), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=514, initializer_range=0.3, pad_token_id=1,
            type_vocab_size=1,
        )  # fmt: skip
        RobertaForQuestionAnswering(config).save_pretrained(folder)
        reader.save_pretrained(folder)
        return folder

    def likely_answers(answer: Any) -> Any:
        """Leave out what the pipeline answers with probability 0: the token for no answer, unasked."""
        if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
            return answer
        kept = [entry for entry in answer if entry["score"] > 0]
        return kept[0] if len(kept) == 1 else kept

    here = Path(__file__).parent
    python = here.parents[1] / "build" / "versions" / "4.57" / "bin" / "python"
    folders = [
        save("BertForQuestionAnswering", tmp_path / "bert", 11),
        save_byte_level(tmp_path / "bytes"),
    ]
    bodies = asked_bodies()
    (tmp_path / "bodies.json").write_text(json.dumps(bodies))
    done = subprocess.run(
        [python, here / "questions.py", tmp_path / "bodies.json", *folders],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder, theirs in zip(folders, json.loads(done.stdout), strict=True):
        served = Handlers(folder, HF_TASK="question-answering")
        # Alone, and merged with all others.
        merged = served.ask_all(bodies)
        for body, answer, theirs_answer in zip(bodies, merged, theirs, strict=True):
            expected = likely_answers(theirs_answer)
            assert_close(answer, expected, 2e-5, f"{folder.name}: {body}")
            if len(str(body)) < 400:
                assert_close(served.ask(body), expected, 2e-5, f"{folder.name}, alone: {body}")
