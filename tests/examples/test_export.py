"""examples/export through `amphora train`: what is written answers as the model it was made of."""

import json
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.causal_kit import make_model
from tests.support.exports import environment, run_on_model
from tests.support.job_tree import Tree
from tests.support.serving_kit import WORDS, save


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


FOX = "The quick brown fox jumps over the lazy dog."


def rounded(folder: Path, texts: Sequence[str] = (FOX,)) -> float:
    """Return the divergence of a decoder whose weights are rounded to 16 levels, by 128 columns."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    with torch.no_grad():
        expected = torch.cat([model(ids).logits[0].log_softmax(-1) for ids in rows])
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                groups = layer.weight.unflatten(-1, (-1, 128))
                step = groups.abs().amax(-1, keepdim=True) / 7.5
                layer.weight.copy_(((groups / step).round().clamp(-8, 7) * step).flatten(-2))
        answer = torch.cat([model(ids).logits[0].log_softmax(-1) for ids in rows])
    return float((expected.exp() * (expected - answer)).sum(-1).mean())


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "scheme",
    ["FP8_DYNAMIC", *(pytest.param(x, marks=pytest.mark.long) for x in ("W8A8", "W4A16", "none"))],
)
def test_a_quantized_decoder_answers_nearly_the_same(
    tmp_path: Path, python: Path, scheme: str
) -> None:
    from transformers import AutoModelForCausalLM

    base = make_model("llama", tmp_path / "model")
    if scheme == "W4A16":  # in groups of 128 columns
        base = save("LlamaForCausalLM", tmp_path / "wide", hidden_size=128, intermediate_size=256)
    folder = base
    if scheme not in ("W8A8", "W4A16"):
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
        assert (
            lost == pytest.approx(rounded(base), rel=0.05) if scheme == "W4A16" else 0 < lost < 0.01
        )
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.heavy
@pytest.mark.long
def test_calibration_loses_less_than_rounding(tmp_path: Path, python: Path) -> None:
    """On rows that did not calibrate."""
    base = save("LlamaForCausalLM", tmp_path / "wide", hidden_size=128, intermediate_size=256)
    drawn = random.Random(0)
    texts = [" ".join(drawn.choices(WORDS, k=drawn.randint(8, 30))) for _ in range(220)]
    tree = Tree(tmp_path / "ml")
    rows = "\n".join(json.dumps({"text": text}) for text in texts)
    tree.channel("train", **{"rows.jsonl": rows})
    output = run_on_model(
        tree, python, base, "export/quantize.py", scheme="W4A16", calibration_rows="200"
    )
    lost = metric(output, "divergence")
    assert 0 < lost < rounded(base, texts[200:220]) / 2
    before, after = metric(output, "perplexity_before"), metric(output, "perplexity")
    assert after == pytest.approx(before, rel=0.2)
    config = json.loads((tree.base / "model/config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4


@pytest.mark.heavy
def test_llama_cpp_converter_writes_the_weights_and_tokens(tmp_path: Path, python: Path) -> None:
    import sentencepiece
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    # The converter knows the tokenizers of published models, and any of SentencePiece.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the red cat and a blue bird", "a quick brown fox"] * 50),
        model_prefix=str(folder / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tree = Tree(tmp_path / "ml")
    output = run_on_model(tree, python, folder, "export/to_gguf.py", outtype="f32")
    assert metric(output, "gguf_difference") < 1e-6
    check = """
import sys
from gguf import GGUFReader
from safetensors.numpy import load_file
reader = GGUFReader(sys.argv[1])
tensors = {tensor.name: tensor.data for tensor in reader.tensors}
weights = load_file(sys.argv[2])
assert (tensors["token_embd.weight"] == weights["model.embed_tokens.weight"]).all()
assert (tensors["blk.1.ffn_down.weight"] == weights["model.layers.1.mlp.down_proj.weight"]).all()
field = reader.fields["tokenizer.ggml.tokens"]
print(*[bytes(field.parts[index]).decode() for index in field.data], sep="\\n")
"""
    done = subprocess.run(
        [python, "-c", check, str(tree.base / "model/model.gguf"), str(folder / "model.safetensors")],
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
