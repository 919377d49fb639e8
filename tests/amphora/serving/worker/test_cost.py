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

GOOD = {"inputs": "good"}
WRITING = ["max_new_tokens", "min_new_tokens", "num_beams", "do_sample", "temperature",
           "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size",
           "length_penalty", "seed"]  # fmt: skip


class Probe:
    """Sends a worker of one task a request, and short requests at the same time."""

    def __init__(self, front: Front, short: dict[str, Any]) -> None:
        self.front, self.short = front, short
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

    def ask(self, body: bytes, patience: float = 0.7) -> tuple[int, float]:
        """Return the status of a request, and the most CPU seconds that a short one waits for it.

        The status is 0 if the client has given up: what is accepted may be long.
        """
        self.statuses.clear()
        self.front.send(long=body)
        longest, end = self._wait("long"), time.monotonic() + patience
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
        self.front.until()
        return self.statuses.get("long", 0), longest


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "task", "short", "names"),
    [
        pytest.param(*row, id=name)
        for name, row in {
            "labels": ("BertForSequenceClassification", "", GOOD,
                       ["top_k", "return_all_scores", "threshold", "truncation", "max_length", "padding"]),
            "zero-shot": ("BertForSequenceClassification", "zero-shot-classification",
                          {**GOOD, "parameters": {"candidate_labels": ["good"]}},
                          ["candidate_labels", "hypothesis_template", "multi_label"]),
            "tags": ("BertForTokenClassification", "", GOOD, ["aggregation_strategy", "ignore_labels", "stride"]),
            "answers": ("BertForQuestionAnswering", "", {"inputs": {"question": "who", "context": "anna said"}},
                        ["top_k", "doc_stride", "max_answer_len", "max_seq_len", "handle_impossible_answer",
                         "align_to_words"]),
            "masks": ("BertForMaskedLM", "", {"inputs": "the [MASK]"}, ["top_k", "truncation", "max_length"]),
            "vectors": ("BertModel", "sentence-similarity", GOOD, ["normalize", "truncation", "max_length"]),
            "token vectors": ("BertModel", "feature-extraction", GOOD, ["truncation", "max_length"]),
            "t5": ("T5ForConditionalGeneration", "", {**GOOD, "parameters": {"max_new_tokens": 2, "num_beams": 1}},
                   [*WRITING, "max_length", "min_length", "typical_p", "early_stopping", "truncation", "prefix"]),
            "texts": ("LlamaForCausalLM", "", {**GOOD, "parameters": {"max_new_tokens": 2}},
                      [*WRITING, "num_return_sequences", "stop", "return_full_text"]),
        }.items()
    ],
)  # fmt: skip
def test_no_request_takes_a_gigabyte_or_makes_a_neighbour_wait(
    kind: str,
    task: str,
    short: dict[str, Any],
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The image's handlers, over a worker's socket; the worker is a thread here."""
    number = st.sampled_from([-1, 0, 1e-38, 0.5, 1, 2, 1e38])
    whole = st.sampled_from([0, 1, 2, 7, 8, 41, 43, 45, 46, 48, 1000, 30_522, 10**6, 2**31, 2**70])
    text = st.builds(lambda word, n: word * n, st.sampled_from(["a", "{}", "{0}", "film "]),
                     st.sampled_from([0, 1, 5000, 90_000]))  # fmt: skip
    listed = st.builds(lambda word, n: [f"{word}{k}" for k in range(n)],
                       st.sampled_from(["a", "good ", "x" * 300]), st.sampled_from([1, 30, 3000]))  # fmt: skip
    flags = ["truncation", "padding", "return_all_scores", "align_to_words", "multi_label", "normalize",
             "handle_impossible_answer", "do_sample", "early_stopping", "return_full_text"]  # fmt: skip
    drawn: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(flags, st.booleans()),
        **dict.fromkeys(["temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"], number),
        **dict.fromkeys(["prefix", "hypothesis_template"], text),
        **dict.fromkeys(["candidate_labels", "ignore_labels", "stop"], listed),
        "aggregation_strategy": st.sampled_from(["none", "simple", "first", "average", "max"]),
        "threshold": number,
    }  # fmt: skip
    values = {name: drawn.get(name, whole) for name in names}
    needed = {name: values.pop(name) for name in names if name == "candidate_labels"}
    # From one short text to many or long ones: below and above what is read in turns, too.
    pieces = st.sampled_from(["a", "a ", "film ", ".", "中", "\U0001f600", "[MASK] ", " "])
    sizes = st.sampled_from(
        [(1, 5), (1, 15_000), (1, 400_000), (1, 3_000_000), (40, 100), (1500, 5), (3000, 300),
         (20, 60_000), (60_000, 5), (200_000, 2)]
    )  # fmt: skip

    def inputs(piece: str, size: tuple[int, int]) -> Any:
        count, length = size
        long = (piece * (length // len(piece.encode()) + 1))[: max(1, length)]
        value: Any = "[MASK]" + long if kind == "BertForMaskedLM" else long
        if kind == "BertForQuestionAnswering":
            value = {"question": "who", "context": long}
        return value if count == 1 else [value] * count

    def kib(name: str) -> int:
        """Return a figure of this process."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    for name, value in (IN_FLOAT32 | ({"HF_TASK": task} if task else {})).items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    labels = {"id2label": {0: "entailment", 1: "neutral", 2: "contradiction"}}
    save(kind, tmp_path, **(labels if task == "zero-shot-classification" else {}))
    seen: set[int] = set()
    with Front(tmp_path, None, batch_size=32, batch_tokens=16384) as front:
        probe = Probe(front, short)

        # The same ones in each run.
        @settings(max_examples=12)
        @given(st.builds(inputs, pieces, sizes), st.fixed_dictionaries(needed, optional=values))
        def check(value: Any, parameters: dict[str, Any]) -> None:
            sent = json.dumps({"inputs": value, "parameters": parameters}).encode()
            before = kib("VmRSS:")
            Path("/proc/self/clear_refs").write_text("5")
            # CPU time, since other processes share the machine; they slow its caches down, so a
            # request may try again.
            for _ in range(3):
                status, waited = probe.ask(sent)
                seen.add(status)
                if waited < 1.0:
                    break
            about = f"{str(parameters)[:300]}, {str(value)[:80]}: {status}"
            assert status in (0, 200, 400, 413), about
            assert waited < 1.0, f"a neighbour waited for {waited} s: {about}"
            more = kib("VmHWM:") - before
            assert more < 1 << 20, f"{more} KiB more: {about}"

        check()
    assert seen & {0, 200}, "none was accepted"
