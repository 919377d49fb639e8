"""The notebooks: valid, executed from top to bottom, without this machine's paths; and executed again."""

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

from tests.support.preloading import PRELOADED

from .aws import SAGEMAKER, violations

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cells: list[dict[str, Any]]) -> list[str]:
    """What each cell wrote, errors too."""
    texts = [
        "".join("".join(output.get("text", "")) for output in cell["outputs"]).strip()
        for cell in cells
    ]
    return [text for text in texts if text]


def check(cells: list[dict[str, Any]]) -> None:
    """A curve, an answer of the server, and a request that AWS takes."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    printed_text = printed(cells)
    assert re.search(
        r"(everyday|incident|fear|LABEL_[01]).*\d\.\d\d", "\n".join(printed_text), re.DOTALL
    )
    shape = SAGEMAKER.operation_model("CreateTrainingJob").input_shape
    assert shape is not None
    assert list(violations(shape, json.loads(printed_text[-1]))) == []


def test_there_is_one_for_each_flow() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "emotion", "hf_training", "trainium_bert", "tweets",
    ]  # fmt: skip
    table = (FOLDER.parent / "README.md").read_text()
    assert all(f"`notebooks/{path.name}`" in table for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_was_executed(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    # The schemas of nbformat, whose import takes seconds.
    package = importlib.util.find_spec("nbformat")
    assert package is not None and package.submodule_search_locations
    version = f"{notebook['nbformat']}.{notebook['nbformat_minor']}"
    schema = Path(package.submodule_search_locations[0], "v4", f"nbformat.v{version}.schema.json")
    fastjsonschema.validate(json.loads(schema.read_text()), notebook)
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    check(cells)
    text = re.sub(r'"image/png": "[^"]*"', "", path.read_text(encoding="utf-8"))
    local_paths = re.findall(r"(?<![\w.])/(?:work|home|root|tmp|usr|Users|private)/[^\s\"']*", text)
    assert not local_paths, "a path of the machine that executed it"


# Half a minute of CPU and more each, but for the one that stands for them in every run of `heavy`.
@pytest.mark.heavy
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, marks=[] if path.stem == "trainium_bert" else pytest.mark.long, id=path.stem
        )
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    # Without the seconds in which a model worker imports torch.
    monkeypatch.setenv("PRELOADING_SOCKET", preloaded["PRELOADING_SOCKET"])
    monkeypatch.setenv("PYTHONPATH", str(PRELOADED))
    # The kernel's connection file and history.
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    kept = len(code_cells(path))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    # By sockets in a folder: ports that are free now may be another test's once the kernel begins.
    sockets = Config({"KernelManager": {"transport": "ipc", "ip": str(tmp_path / "at")}})
    NotebookClient(
        notebook, timeout=280, startup_timeout=200, kernel_name="python3", config=sockets,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()  # fmt: skip
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) == kept
    check(cells)
