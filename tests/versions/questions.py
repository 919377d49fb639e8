"""Answers questions by the question-answering pipeline that transformers 4 has.

questions.py BODIES MODEL...: prints, as JSON, for each model what the pipeline answers to each
body's inputs and parameters, or null if it raises.
"""

import json
import sys
import warnings

import torch
import transformers


def main(bodies_path: str, *folders: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with open(bodies_path) as file:  # noqa: PTH123 - runs under other versions, alone
        bodies = json.load(file)
    answers = []
    for folder in folders:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        pipeline = transformers.pipeline("question-answering", model=folder, tokenizer=tokenizer)
        answers.append([])
        for body in bodies:
            try:
                answers[-1].append(pipeline(body["inputs"], **body["parameters"]))
            except (TypeError, ValueError):
                answers[-1].append(None)
    print(json.dumps(answers, default=float))


main(*sys.argv[1:])
