"""Implements `amphora predict`: answers each row of a file by a served model.

The file is sent to `amphora serve` in JSON Lines, as a batch transform does, so that user code,
vLLM and all workers answer as on an endpoint. Answers are kept next to the output until all are
there: a run that was stopped continues after them.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import ctypes
import gzip
import hashlib
import http.client
import itertools
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from amphora.common.errors import AmphoraError, ConfigError
from amphora.local import local_job

log = logging.getLogger("amphora")

Row = dict[str, Any]
Columns = Mapping[str, str | Sequence[str]]
"""A column of each key of a request's input, or the columns of a list."""
_ROWS, _CHARACTERS, _REQUESTS = 64, 200_000, 8
"""The most rows and characters of a request, and requests on their way."""
_PR_SET_PDEATHSIG = 1
_TIMEOUT_SECONDS = 3600
_LOG_SECONDS = 10.0
_FORMS = (
    *(("question", "choices", "context"), ("question", "choices"), ("question", "context")),
    *(("text", "text_pair"), ("premise", "hypothesis"), ("query", "passage")),
    *(("inputs",), ("messages",), ("prompt",), ("text",), ("sentence",)),
)
"""Columns of a record if the model does not name those of its training, in this order."""
_TEXTS = {"text", "body", "message", "content", "description", "sentence", "review", "comment"}
_LONE = "text"
"""The column of a file that has texts without a header."""
_PARTS = (_LONE, "text_pair")
_NONE = object()
"""Stands for a cell that a row does not have."""
_PREFIX, _ANSWER, _ERROR = "predicted_", "prediction", "error"


def predict(folder: Path, data: Path, out: Path, text_column: str | None) -> int:
    """Answer each row of a file, and write its columns with the answers. Return 1 if rows failed.

    Args:
        folder: A run's folder, or a model's.
        data: A .csv, .tsv, .jsonl or .txt file, also with .gz.
        out: A .csv or .jsonl file.
        text_column: The column of the texts, or two (a,b); default: those of the training.

    Raise AmphoraError if an argument is wrong, or the model cannot be served.
    """
    model = folder / "model" if (folder / "model").is_dir() else folder
    if not local_job.is_hub_name(folder):
        local_job.check_model(folder)
    if not data.is_file():
        raise ConfigError(
            f"{data} is not a file.{local_job.names_like(data)}",
            "Give the file whose rows to answer.",
        )
    if out.resolve() == data.resolve():
        raise ConfigError("--out is the file of the rows.", "Give another file.")
    if out.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"--out is {str(out)!r}.", "Give a file that ends in .csv or .jsonl.")
    rows = list(_read_rows(data))
    if not rows:
        raise ConfigError(f"{data} has no rows.", "Give a file with rows below its header.")
    columns = dict.fromkeys(name for row in rows for name in row)
    taken = [name for name in columns if name == _ANSWER or name.startswith(_PREFIX)]
    if taken:
        raise ConfigError(
            f"{data} has the column {taken[0]!r}, and answers have such names.",
            f"Rename columns named {_ANSWER!r} or {_PREFIX}...",
        )
    record = _record_of(rows, model, text_column, data)
    part = out.with_name(f"{out.name}.part")
    mark = _fingerprint(data, model, text_column)
    done = _read_answers(part, mark)
    if done:
        log.info("%s has the answers to %d of %d rows: continuing", part, len(done), len(rows))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if len(done) < len(rows):
            _answer(folder, rows, record, part, mark, len(done))
        answers = _read_answers(part, mark)
        _write(out, rows, answers)
        part.unlink()
    except (OSError, http.client.HTTPException) as error:
        raise AmphoraError(
            f"The answers are not complete: {error}.",
            f"Start the command again: it continues after the answers in {part}.",
        ) from error
    failed = sum(isinstance(answer, dict) and _ERROR in answer for answer in answers)
    log.info("%s has the answers to %d rows, %d of them errors", out, len(answers), failed)
    return int(failed > 0)


def _read_rows(data: Path) -> Iterator[Row]:
    """Yield the rows of a file. Raise ConfigError if it has another format, or a row is invalid."""
    suffixes = [suffix for suffix in data.suffixes if suffix != ".gz"]
    kind = suffixes[-1].lower() if suffixes else ""
    if kind not in (".csv", ".tsv", ".jsonl", ".ndjson", ".txt"):
        raise ConfigError(
            f"{data} has the suffix {kind or 'of no format'!r}.",
            "Give a .csv, .tsv, .jsonl or .txt file; save the sheet of a workbook as CSV.",
        )
    opened: Callable[..., IO[str]] = gzip.open if data.suffix == ".gz" else open
    number = 0
    with opened(data, "rt", encoding="utf-8-sig", newline="") as file:
        try:
            if kind in (".csv", ".tsv"):
                csv.field_size_limit(sys.maxsize)
                delimiter = "\t" if kind == ".tsv" else _delimiter(file.readline())
                file.seek(0)
                reader = csv.reader(file, delimiter=delimiter, strict=True)
                header, number = next(reader, []), 1
                if len(set(header)) < len(header):
                    raise ValueError("two columns have one name")
                for cells in reader:
                    number = reader.line_num
                    if cells and len(cells) != len(header):
                        raise ValueError("it has another number of fields than the header")
                    if cells:
                        yield dict(zip(header, cells, strict=True))
                return
            for line in file:
                number += 1
                if kind == ".txt":
                    yield {_LONE: line.rstrip("\r\n")}
                elif line.strip():
                    value = json.loads(line)
                    json.dumps(value, ensure_ascii=False).encode()  # not half a surrogate
                    yield value if isinstance(value, dict) else {_LONE: value}
        except UnicodeDecodeError as error:
            raise ConfigError(f"{data} is not UTF-8: {error}.", "Save it as UTF-8.") from error
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{data}, line {number}: {error}.", "Correct the row.") from error
        except (OSError, EOFError) as error:
            raise ConfigError(f"{data} cannot be read: {error}.", "Give a whole file.") from error


def _delimiter(header: str) -> str:
    """Return the delimiter that cuts the first line of a .csv file into most columns."""
    return max(
        ",;\t|", key=lambda delimiter: len(next(csv.reader([header], delimiter=delimiter), []))
    )


def _record_of(
    rows: Sequence[Row], model: Path, text_column: str | None, data: Path
) -> Callable[[Row], dict[str, Any]]:
    """Return what makes a request's record of a row. Raise ConfigError if columns are unclear.

    Names decide: a model that knows the columns of its training answers no others, except those
    of --text_column, the plain texts of a file without columns, and the bodies of requests.
    """
    row, trained = rows[0], _trained_columns(model)
    named = [name.strip() for name in (text_column or "").split(",") if name.strip()]
    keys = list(trained or _PARTS)
    if len(named) > len(keys):
        raise ConfigError(
            f"--text_column names {len(named)} columns.", f"Name at most {len(keys)}."
        )
    forms: Sequence[Columns] = [{name: name for name in form} for form in _FORMS]
    if named:
        forms = [dict(zip(keys, named, strict=False))]
    elif list(row) == [_LONE] and len(trained) < 2:
        forms = [{keys[0]: _LONE}]
    elif trained:
        forms = [trained, {"inputs": "inputs"}]
    chosen = next((form for form in forms if not _lacking(row, form)), None)
    if chosen is None:
        wanted = ", ".join(_lacking({}, forms[0])) if named or trained else "text"
        sizes = {name: sum(len(str(some.get(name, ""))) for some in rows[:20]) for name in row}
        likely = sorted(row, key=lambda name: (name.lower() not in _TEXTS, -sizes[name]))
        example = ",".join(likely[: max(1, min(2, len(trained)))])
        raise ConfigError(
            f"{data} has the columns {', '.join(row)}, and not {wanted}.",
            f"Name the texts: --text_column {shlex.quote(example)}",
        )
    if made := [key for key in ("input", "tools") if key in chosen]:
        raise ConfigError(
            f"The model was trained on prompts made of several columns, one of them {made[0]!r}.",
            "Write the whole prompts in a column of their own, and name it in --text_column; or "
            "send requests to `amphora serve`.",
        )

    for row in rows:
        if missing := _lacking(row, chosen):
            raise ConfigError(
                f"{data} has a row without {missing[0]!r}: {str(row)[:100]}.",
                "Give all rows the same columns.",
            )

    def record(row: Row) -> dict[str, Any]:
        cells: Row = {
            key: _cell_of(row, names)
            if isinstance(names, str)
            else [_cell_of(row, name) for name in names]
            for key, names in chosen.items()
        }
        if isinstance(talk := cells.get("messages"), str):
            cells["messages"] = [{"role": "user", "content": talk}]
        if system := cells.pop("system", None):
            cells["messages"] = [{"role": "system", "content": system}, *cells["messages"]]
        if "image" in cells:
            cells["image"] = _image(data.parent / str(cells["image"]))
        return {"inputs": cells if len(cells) > 1 else cells.popitem()[1]}

    return record


def _trained_columns(model: Path) -> Columns:
    """Return the columns of a model's training by the keys of an input; empty if unknown."""
    config: Row = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((model / "config.json").read_text())
    former = dict(zip(_PARTS, config.get("text_columns") or (), strict=False))
    columns: Columns = (config.get("trained_task") or {}).get("columns", former)
    return columns


def _lacking(row: Row, form: Columns) -> list[str]:
    """Return the columns of a form that a row does not have."""
    names = [name for some in form.values() for name in ([some] if isinstance(some, str) else some)]
    return [name for name in names if _cell_of(row, name) is _NONE]


def _cell_of(row: Row, name: str) -> Any:
    """Return the cell of a column, which may be within an object: `translation.en`."""
    if name in row:
        return row[name]
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return _cell_of(inner, rest) if rest and isinstance(inner, dict) else _NONE


def _image(path: Path) -> str:
    """Return a file in base64. Raise ConfigError if it cannot be read."""
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.", "Give paths relative to the file of rows."
        ) from error


def _fingerprint(data: Path, model: Path, text_column: str | None) -> str:
    """Return a digest of the file, and of the model by its sums or, without them, by its files'
    sizes and times."""
    digest = hashlib.sha256(f"{model.resolve()} {text_column}".encode())
    with data.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    sums = model / "SHA256SUMS"
    if sums.is_file():
        digest.update(sums.read_bytes())
    else:
        for path in sorted(model.rglob("*")):
            if path.is_file() and path.parent.name != "__pycache__":
                state = path.stat()
                name = path.relative_to(model)
                digest.update(f"{name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _read_answers(part: Path, mark: str) -> list[Any]:
    """Return the answers of an earlier run for the same file and model; cut a line that was not
    written completely."""
    if not part.is_file():
        return []
    *lines, _ = part.read_bytes().split(b"\n")
    if not lines or lines[0].decode(errors="replace") != mark:
        return []
    os.truncate(part, sum(len(line) + 1 for line in lines))
    return [json.loads(line) for line in lines[1:]]


def _requests(rows: Sequence[Row], record: Callable[[Row], dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of each request."""
    lines: list[str] = []
    for row in rows:
        line = json.dumps(record(row), ensure_ascii=False)
        if lines and (len(lines) >= _ROWS or sum(map(len, lines)) + len(line) > _CHARACTERS):
            yield lines
            lines = []
        lines.append(line)
    if lines:
        yield lines


def _answer(
    folder: Path,
    rows: Sequence[Row],
    record: Callable[[Row], dict[str, Any]],
    part: Path,
    mark: str,
    done: int,
) -> None:
    """Append the answers to the rows from number `done` on, in their order."""
    requests, count = _requests(rows[done:], record), len(rows)
    with (
        part.open("a" if done else "w", encoding="utf-8") as file,
        ThreadPoolExecutor(_REQUESTS) as pool,
        _served(folder) as url,  # ends first, and with it the requests on their way
        tqdm(total=count, initial=done, unit="row", disable=not sys.stderr.isatty()) as bar,
    ):
        if not done:
            file.write(f"{mark}\n")
        line_at = time.monotonic() + _LOG_SECONDS
        waiting: deque[Future[list[Any]]] = deque()
        while True:
            for lines in itertools.islice(requests, _REQUESTS - len(waiting)):
                waiting.append(pool.submit(_ask, url, lines))
            if not waiting:
                return
            while wait([waiting[0]], max(0.0, line_at - time.monotonic())).not_done:
                line_at = time.monotonic() + _LOG_SECONDS
                bar.refresh()
                if bar.disable:
                    log.info("%d of %d rows answered", done, count)
            answers = waiting.popleft().result()
            done += len(answers)
            file.writelines(f"{json.dumps(answer, ensure_ascii=False)}\n" for answer in answers)
            file.flush()
            bar.update(len(answers))


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Yield the address of a server of the model, which ends with the block.

    Raise AmphoraError if it ends before: its log, on stderr, has the reason.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **os.environ, "AMPHORA_BIND": "127.0.0.1", "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MODEL_SERVER_TIMEOUT": str(_TIMEOUT_SECONDS),
    }  # fmt: skip
    command = [sys.executable, "-m", "amphora", "serve", str(folder)]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def end_with_parent() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    # The server must not outlive this process, whatever ends it.
    previous = signal.signal(signal.SIGTERM, stop)
    server = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/ping", timeout=5).close()
                break
            if server.poll() is not None:
                raise AmphoraError(
                    f"The model in {folder} cannot be served: the lines above say why."
                )
            time.sleep(0.1)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        signal.signal(signal.SIGTERM, previous)


def _ask(url: str, lines: Sequence[str]) -> list[Any]:
    """Return the answer to each line, `{"error": ...}` for one that has none."""
    request = urllib.request.Request(
        f"{url}/invocations",
        data="\n".join(lines).encode(),
        headers={"Content-Type": "application/jsonlines", "Accept": "application/jsonlines"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            answers = [json.loads(line) for line in response.read().splitlines()]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            text = json.loads(text)["error"]["message"]
        answers = [{_ERROR: text}]
    if len(answers) == len(lines):
        return answers
    if len(lines) == 1:
        return [answers]
    # One that is wrong does not cost the others their answers.
    return [answer for line in lines for answer in _ask(url, [line])]


def _write(out: Path, rows: Sequence[Row], answers: Sequence[Any]) -> None:
    """Write the rows with their answers, complete or not at all."""
    unfinished = out.with_name(f"{out.name}.writing")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        if out.suffix == ".jsonl":
            for row, answer in zip(rows, answers, strict=True):
                file.write(f"{json.dumps({**row, _ANSWER: answer}, ensure_ascii=False)}\n")
        else:
            cells = [_cells(answer) for answer in answers]
            names = dict.fromkeys(name for row in (*rows, *cells) for name in row)
            writer = csv.DictWriter(file, list(names))
            writer.writeheader()
            simple = (str, int, float, type(None))
            for row, predicted in zip(rows, cells, strict=True):
                values = {**row, **predicted}
                for name, value in values.items():
                    if not isinstance(value, simple):
                        values[name] = json.dumps(value, ensure_ascii=False)
                writer.writerow(values)
    unfinished.replace(out)


def _cells(answer: Any) -> Row:
    """Return the columns of an answer: its values by name, or all of it as JSON.

    Lists stay whole, since a text with one entity must have the columns of one with two; only
    generation has lists of one by design.
    """
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        answer = answer[0] if "generated_text" in answer[0] else answer
    if isinstance(answer, dict):
        return {f"{_PREFIX}{name}": value for name, value in answer.items()}
    return {_ANSWER: answer}
