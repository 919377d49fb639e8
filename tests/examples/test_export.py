"""examples/export through `amphora train`: what is written answers as the model it was made of."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.causal_kit import make_model
from tests.support.exports import environment, run_on_model
from tests.support.job_tree import Tree
from tests.support.serving_kit import save


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("venv"))


def metric(output: str, name: str) -> float:
    (value,) = re.findall(rf"^.*metric {name}=(\S+)", output, re.M)
    return float(value)


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertModel"])
def test_onnx_answers_as_pytorch(tmp_path: Path, python: Path, kind: str) -> None:
    folder = save(kind, tmp_path / "model")
    tree = Tree(tmp_path / "ml")
    output = run_on_model(tree, python, folder, "export/to_onnx.py")
    assert metric(output, "onnx_difference") < 1e-5
    # By a program of our own: one text of another length.
    check = """
import sys, numpy, onnxruntime, torch, transformers
out, folder, kind = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(out)
session = onnxruntime.InferenceSession(out + "/model.onnx")
wanted = [i.name for i in session.get_inputs()]
texts = tokenizer(["good film"], return_tensors="pt")
model = getattr(transformers, kind).from_pretrained(folder).eval()
expected = model(**{name: texts[name] for name in wanted})[0].detach().numpy()
answer = session.run(None, {name: texts[name].numpy() for name in wanted})[0]
print(numpy.abs(answer - expected).max())
"""
    done = subprocess.run(
        [python, "-c", check, str(tree.base / "model"), str(folder), kind],
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1e-5


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "scheme", ["FP8_DYNAMIC", *(pytest.param(x, marks=pytest.mark.long) for x in ("W8A8", "none"))]
)
def test_a_quantized_decoder_answers_nearly_the_same(
    tmp_path: Path, python: Path, scheme: str
) -> None:
    from transformers import AutoModelForCausalLM

    base = make_model("llama", tmp_path / "model")
    folder = base
    if scheme != "W8A8":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        adapted = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base), LoraConfig(init_lora_weights=False)
        )
        folder = tmp_path / "adapter"
        adapted.save_pretrained(folder)
        for path in base.glob("token*"):
            (folder / path.name).write_bytes(path.read_bytes())
    tree = Tree(tmp_path / "ml")
    output = run_on_model(tree, python, folder, "export/quantize.py", scheme=scheme)
    lost = metric(output, "divergence")
    config = json.loads((tree.base / "model/config.json").read_text())
    assert not (tree.base / "model/adapter_config.json").exists()
    if scheme == "none":
        assert lost < 1e-6
        assert "quantization_config" not in config
    else:
        assert 0 < lost < 0.01
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"
