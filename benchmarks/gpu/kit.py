"""What a machine with a GPU and without a network needs besides torch and transformers.

    make gpu-kit                writes build/gpu-kit: wheels for Python 3.12, MiniLM in bfloat16
    pip install --no-index --no-deps build/gpu-kit/wheels/*.whl     there

The machine must have torch, numpy, transformers, accelerate and safetensors. The kit holds other
packages that `code/` and `container/` import, but not boto3, which only S3 needs. 60 MB at most.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from stage import ROOT, minilm, parser

KIT = ROOT / "build" / "gpu-kit"
WHEELS = (
    "datasets", "dill", "multiprocess", "xxhash", "evaluate", "peft", "starlette", "uvicorn",
    "httptools", "anyio", "h11", "click", "prometheus-client", "python-dateutil",
    "six", "tensorboardx", "threadpoolctl", "joblib", "sentence-transformers", "jinja2",
    "markupsafe", "seqeval", "sacrebleu", "portalocker", "tabulate", "colorama", "rouge-score",
    "absl-py", "nltk", "sentencepiece", "trl",
)  # fmt: skip
"""Small ones only: pyarrow, pandas, scikit-learn, scipy and matplotlib would be 150 MB."""
SOURCE_ONLY = ("seqeval", "rouge-score")
MOST = 60 << 20


def main() -> None:
    """Write the kit."""
    parser(__doc__).parse_args()
    shutil.rmtree(KIT, ignore_errors=True)
    wheels = KIT / "wheels"
    wheels.mkdir(parents=True)
    lock = (ROOT / "container" / "locks" / "image.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", lock, re.M))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    requirements = {name: f"{name}=={locked[name]}" for name in WHEELS if name in locked}
    source = [requirements.pop(name) for name in SOURCE_ONLY if name in requirements]
    subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12",
         "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64",
         "--dest", str(wheels), *requirements.values()],
        check=True,
    )  # fmt: skip
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), *source], check=True)
    save_minilm(KIT / "minilm")
    size = sum(path.stat().st_size for path in KIT.rglob("*") if path.is_file())
    if lacking := [name for name in WHEELS if name not in locked]:
        print(f"not in the lock, and left out: {', '.join(lacking)}")
    print(f"{KIT}: {len(list(wheels.iterdir()))} wheels, {size / 1e6:.0f} MB in all")
    if size > MOST:
        sys.exit(f"more than {MOST >> 20} MiB")


def save_minilm(folder: Path) -> None:
    """Save MiniLM-L6 in bfloat16."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(minilm(), dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)


if __name__ == "__main__":
    main()
