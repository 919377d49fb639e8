"""No accepted request takes a gigabyte, or makes a neighbour wait, whatever its parameters are."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amphora.serving.protocol import messages
from tests.support.servers import IN_FLOAT32
from tests.support.serving_kit import save
from tests.support.worker_front import Front

pytestmark = pytest.mark.heavy
# Clients that give up: what is accepted may be long.
PATIENCE = 0.7

TEXT = st.builds(lambda word, n: word * n, st.sampled_from(["a", "{}", "{0}", "film "]),
                 st.sampled_from([0, 1, 5000, 90_000]))  # fmt: skip
NAMES = st.builds(lambda word, n: [f"{word}{k}" for k in range(n)],
                  st.sampled_from(["a", "good ", "x" * 300]), st.sampled_from([1, 30, 3000]))  # fmt: skip
WRITING = ["max_new_tokens", "min_new_tokens", "num_beams", "do_sample", "temperature",
           "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size",
           "length_penalty", "seed"]  # fmt: skip
ENTAILMENT = {"id2label": {0: "entailment", 1: "neutral", 2: "contradiction"}}
TASKS: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "labels": ("BertForSequenceClassification", {}, "",
               ["top_k", "return_all_scores", "threshold", "truncation", "max_length", "padding"]),
    "zero-shot": ("BertForSequenceClassification", ENTAILMENT, "zero-shot-classification",
                  ["candidate_labels", "hypothesis_template", "multi_label"]),
    "tags": ("BertForTokenClassification", {}, "",
             ["aggregation_strategy", "ignore_labels", "stride"]),
    "answers": ("BertForQuestionAnswering", {}, "",
                ["top_k", "doc_stride", "max_answer_len", "max_seq_len",
                 "handle_impossible_answer", "align_to_words"]),
    "masks": ("BertForMaskedLM", {}, "", ["top_k", "truncation", "max_length"]),
    "vectors": ("BertModel", {}, "sentence-similarity", ["normalize", "truncation", "max_length"]),
    "token vectors": ("BertModel", {}, "feature-extraction", ["truncation", "max_length"]),
    "t5": ("T5ForConditionalGeneration", {}, "",
           [*WRITING, "max_length", "min_length", "typical_p", "early_stopping", "truncation", "prefix"]),
    "texts": ("LlamaForCausalLM", {}, "",
              [*WRITING, "num_return_sequences", "stop", "return_full_text"]),
}  # fmt: skip
PIECES = st.sampled_from(["a", "a ", "film ", ".", "中", "\U0001f600", "[MASK] ", " "])
# How many texts, and how many bytes each has: bodies below and above what is read in turns, too.
SIZES = st.sampled_from(
    [(1, 5), (1, 15_000), (1, 400_000), (1, 3_000_000), (40, 100), (1500, 5), (3000, 300),
     (20, 60_000), (60_000, 5), (200_000, 2)]
)  # fmt: skip


def inputs(task: str) -> st.SearchStrategy[Any]:
    """What a request of the task asks about, from one short text to many or long ones."""

    def made(piece: str, size: tuple[int, int]) -> Any:
        count, length = size
        text = (piece * (length // len(piece.encode()) + 1))[: max(1, length)]
        if task == "masks":
            text = "[MASK]" + text
        if task == "answers":
            requested = {"question": "who", "context": text}
            return requested if count == 1 else [requested] * count
        return text if count == 1 else [text] * count

    return st.builds(made, PIECES, SIZES)


class Body(dict[str, Any]):
    """A request that hypothesis shows in a line."""

    def __repr__(self) -> str:
        return str(dict(self))[:300]


SHORT: dict[str, Any] = {
    "answers": {"inputs": {"question": "who", "context": "anna said"}},
    "zero-shot": {"inputs": "good", "parameters": {"candidate_labels": ["good"]}},
    "masks": {"inputs": "the [MASK]"},
    "t5": {"inputs": "good", "parameters": {"max_new_tokens": 2, "num_beams": 1}},
    "texts": {"inputs": "good", "parameters": {"max_new_tokens": 2}},
}


class Probe:
    """Sends a worker of one task a request, and short requests at the same time."""

    def __init__(self, front: Front, task: str) -> None:
        self.front, self.short = front, SHORT.get(task, {"inputs": "good"})
        self.statuses: dict[str, int] = {}

    def _wait(self, name: str) -> float:
        """Wait until a request is answered, or the worker takes others; return the CPU seconds."""
        began = time.process_time()
        while name not in self.statuses:
            header, _ = self.front.receive()
            if "status" in header:
                self.statuses[header["id"]] = header["status"]
            elif header.get("state") in ("open", "idle") and header["batch"] == self.front.number:
                break
        return time.process_time() - began

    def ask(self, body: bytes) -> tuple[int, float]:
        """Return the status of a request, and the most CPU seconds that a short one waits for it.

        The status is 0 if the client has given up.
        """
        self.statuses.clear()
        self.front.send(long=body)
        longest, end = self._wait("long"), time.monotonic() + PATIENCE
        while "long" not in self.statuses and time.monotonic() < end:
            self.statuses.pop("short", None)
            self.front.send(short=self.short)
            waited = 0.0
            while "short" not in self.statuses:
                waited += self._wait("short")
            longest = max(longest, waited)
            assert self.statuses["short"] == 200
            time.sleep(0.02)
        if "long" not in self.statuses:
            self.front.tell(messages.Cancel(id="long"))
        self.front.send(last=self.short)
        self.front.until_idle()
        return self.statuses.get("long", 0), longest


def _kib(name: str) -> int:
    """Return a figure of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("task", TASKS)
def test_no_request_takes_a_gigabyte_or_makes_a_neighbour_wait(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The image's handlers, over a worker's socket; the worker is a thread here."""
    flag = st.booleans()
    number = st.sampled_from([-1, 0, 1e-38, 0.5, 1, 2, 1e38])
    whole = st.sampled_from([0, 1, 2, 7, 8, 41, 43, 45, 46, 48, 1000, 30_522, 10**6, 2**31, 2**70])
    values: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(
            ["top_k", "stride", "doc_stride", "max_answer_len", "max_seq_len",
             "max_length", "max_new_tokens", "min_new_tokens", "min_length", "num_beams",
             "num_return_sequences", "no_repeat_ngram_size", "truncate", "truncate_dim", "seed"], whole),
        **dict.fromkeys(["temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"], number),
        **dict.fromkeys(
            ["truncation", "padding", "return_all_scores", "align_to_words", "multi_label", "normalize",
             "handle_impossible_answer", "do_sample", "early_stopping",
             "return_full_text"], flag),
        **dict.fromkeys(["prefix", "hypothesis_template"], TEXT),
        **dict.fromkeys(["candidate_labels", "ignore_labels", "stop"], NAMES),
        "aggregation_strategy": st.sampled_from(["none", "simple", "first", "average", "max"]),
        "function_to_apply": st.sampled_from(["sigmoid", "softmax", "none"]),
        "threshold": number,
    }  # fmt: skip

    def bodies(task: str) -> st.SearchStrategy[Body]:
        names = TASKS[task][3]
        some = st.fixed_dictionaries({}, optional={name: values[name] for name in names})
        if task == "zero-shot":
            needed = {"candidate_labels": NAMES}
            some = st.fixed_dictionaries(
                needed, optional={name: values[name] for name in names[1:]}
            )
        return st.builds(
            lambda value, given: Body(inputs=value, parameters=given), inputs(task), some
        )

    # Of each task; the same ones in each run.
    examples = 12
    memory_kib = 1 << 20
    tries = 3
    # A neighbour's short request waits for no more work of the worker than this. CPU time, since
    # other processes share the machine; they slow its caches down, so a request may try again.
    neighbour_cpu_seconds = 1.0
    kind, config, named, _ = TASKS[task]
    for name, value in ({**IN_FLOAT32} | ({"HF_TASK": named} if named else {})).items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    save(kind, tmp_path, **config)
    seen: set[int] = set()
    with Front(tmp_path, None, batch_size=32, batch_tokens=16384) as front:
        probe = Probe(front, task)

        @settings(max_examples=examples)
        @given(body=bodies(task))
        def check(body: Body) -> None:
            sent = json.dumps(body).encode()
            before = _kib("VmRSS:")
            Path("/proc/self/clear_refs").write_text("5")
            longest = float("inf")
            for _ in range(tries):
                status, waited = probe.ask(sent)
                longest = min(longest, waited)
                seen.add(status)
                if longest < neighbour_cpu_seconds:
                    break
            about = f"{str(body['parameters'])[:300]}, {str(body['inputs'])[:80]}: {status}"
            assert status in (0, 200, 400, 413), about
            assert longest < neighbour_cpu_seconds, f"a neighbour waited for {longest} s: {about}"
            more = _kib("VmHWM:") - before
            assert more < memory_kib, f"{more} KiB more: {about}"

        check()
    assert seen & {0, 200}, "none was accepted"
