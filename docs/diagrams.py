"""Write the drawings in docs/images: `.venv/bin/python docs/diagrams.py`.

Each drawing is a list of boxes, arrows and notes. It has its own background, so that it is readable
on any page, and dark colours if the reader prefers them. tests/repository/test_release.py
compares the files with what this makes.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
STYLE = """
svg { --paper: #ffffff; --ink: #1f2933; --line: #52606d; --soft: #52606d;
  --plain: #eef2f6; --ours: #dbeafe; --user: #fef3c7; --out: #dcfce7; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #1b1f24; --ink: #e6edf3; --line: #9aa7b4; --soft: #b6c2cf;
    --plain: #2a3038; --ours: #1e3a5f; --user: #574511; --out: #1c4a2f; } }
text { font: 14px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
.note { font-size: 12px; fill: var(--soft); }
.left { text-anchor: start; }
.bold { font-weight: 600; }
.arrow { stroke: var(--line); stroke-width: 1.5; fill: none; marker-end: url(#tip); }
rect { stroke: var(--line); rx: 6px; }
.paper { fill: var(--paper); stroke: none; }
.plain { fill: var(--plain); }
.ours { fill: var(--ours); }
.user { fill: var(--user); }
.out { fill: var(--out); }
.pad { fill: none; stroke-dasharray: 3 3; }
"""


class Drawing:
    """An SVG under construction; places are in pixels from the top left."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" style="fill: var(--line)"/>'
            "</marker></defs>",
            f'<rect class="paper" width="{width}" height="{height}"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, text: str, kind: str = "plain") -> None:
        """Draw a box with lines of text in its middle; the first is bold if there are several."""
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'
        )
        lines = text.split("\n")
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            style = "note" if number else ("bold" if len(lines) > 1 else "")
            self._parts.append(
                f'<text class="{style}" x="{x + width / 2:g}" y="{top + 18 * number:g}">'
                f"{escape(line)}</text>"
            )

    def arrow(self, *points: tuple[int, int]) -> None:
        """Draw a line through points, with a tip at its end."""
        path = " ".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="M{path}"/>')

    def note(self, x: int, y: int, text: str, style: str = "note left") -> None:
        """Write a line of text, from its left end."""
        self._parts.append(f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>')

    def text(self) -> str:
        """Return the file."""
        return "\n".join([*self._parts, "</svg>", ""])


def layers() -> Drawing:
    """Return the packages, each above those that it may import."""
    drawing = Drawing("Layers of both packages", 860, 400)
    drawing.note(20, 28, "container/amphora: speaks SageMaker", "bold left")
    drawing.box(20, 42, 380, 44, "cli", "ours")
    drawing.box(20, 96, 185, 130, "training\na job, from start to end", "ours")
    drawing.box(215, 96, 185, 34, "serving", "ours")
    drawing.box(215, 136, 88, 40, "http\nroutes", "ours")
    drawing.box(312, 136, 88, 40, "vllm\ndecoders", "ours")
    drawing.box(215, 182, 88, 44, "pool\nthe queue", "ours")
    drawing.box(312, 182, 88, 44, "worker\na model", "ours")
    drawing.box(20, 236, 380, 44, "contract\nthe job as one frozen value", "ours")
    drawing.box(20, 290, 380, 44, "common\nerrors, logs, variables, devices, archives", "ours")
    drawing.note(460, 28, "code/recipe: trains and answers", "bold left")
    drawing.box(460, 42, 185, 34, "training\none run", "out")
    drawing.box(655, 42, 185, 34, "inference\na saved model that answers", "out")
    drawing.box(460, 82, 380, 34, "plan\ndecides how a job runs", "out")
    drawing.box(460, 122, 380, 34, "tasks\na folder for each", "out")
    drawing.box(460, 162, 150, 44, "backend", "out")
    drawing.box(620, 162, 220, 44, "reports | models\ntokenization", "out")
    drawing.box(460, 216, 380, 28, "batching", "out")
    drawing.box(460, 254, 380, 28, "data", "out")
    drawing.box(460, 292, 380, 28, "runtime | storage", "out")
    drawing.box(460, 330, 380, 28, "arguments, hyperparameters, paths, metrics, errors", "out")
    drawing.note(
        20,
        384,
        "Neither imports the other: amphora starts train.py and loads inference.py by path.",
    )
    return drawing


def job() -> Drawing:
    """Return the life of a training job."""
    drawing = Drawing("The life of a training job", 860, 330)
    drawing.box(20, 40, 150, 60, "/opt/ml/input\nconfig, channels")
    drawing.box(210, 40, 150, 60, "contract\nread_job", "ours")
    drawing.box(400, 40, 170, 60, "entry_point\nfetch code, install", "ours")
    drawing.box(610, 40, 230, 60, "launch\nPython, torchrun or mpirun", "ours")
    drawing.box(610, 140, 230, 60, "process_tree\nmasks output, passes signals on", "ours")
    drawing.box(400, 140, 170, 60, "train.py\nthe recipe, or your script", "user")
    drawing.box(210, 140, 150, 60, "checkpoints\nwhole ones only", "out")
    drawing.box(20, 140, 150, 60, "/opt/ml/model\nand the report", "out")
    drawing.box(400, 240, 170, 60, "failure\nthe innermost cause", "ours")
    drawing.box(610, 240, 230, 60, "cluster\none decision for all hosts", "ours")
    drawing.box(210, 240, 150, 60, "output/failure\nFailureReason", "out")
    for left in (170, 360, 570):
        drawing.arrow((left, 70), (left + 40, 70))
    drawing.arrow((725, 100), (725, 140))
    for right in (610, 400, 210):
        drawing.arrow((right, 170), (right - 40, 170))
    drawing.arrow((285, 200), (285, 218), (440, 218), (440, 200))
    drawing.note(450, 222, "resume")
    drawing.arrow((725, 200), (725, 240))
    drawing.arrow((610, 270), (570, 270))
    drawing.arrow((400, 270), (360, 270))
    return drawing


def request() -> Drawing:
    """Return the life of a request."""
    drawing = Drawing("The life of a request", 860, 290)
    drawing.box(20, 70, 110, 60, "client\nHTTP")
    drawing.box(180, 30, 330, 210, "", "plain")
    drawing.note(195, 52, "front: imports no user code", "bold left")
    drawing.box(200, 70, 140, 60, "http\nbounds, body, id", "ours")
    drawing.box(355, 70, 140, 60, "pool\none queue", "ours")
    drawing.box(200, 160, 140, 60, "answer\nlog line, metrics", "ours")
    drawing.box(355, 160, 140, 60, "dispatching\nto a free worker", "ours")
    drawing.box(580, 30, 260, 210, "", "plain")
    drawing.note(595, 52, "worker: one for each device", "bold left")
    drawing.box(600, 66, 220, 30, "input_fn, for each request", "user")
    drawing.box(600, 108, 220, 30, "tokens_fn, calls by length", "user")
    drawing.box(600, 150, 220, 30, "predict_batch_fn, for all", "user")
    drawing.box(600, 192, 220, 30, "output_fn, for each request", "user")
    drawing.arrow((130, 100), (200, 100))
    drawing.arrow((340, 100), (355, 100))
    drawing.arrow((425, 130), (425, 160))
    drawing.arrow((495, 190), (545, 190), (545, 81), (600, 81))
    for top in (96, 138, 180):
        drawing.arrow((710, top), (710, top + 12))
    drawing.arrow((710, 222), (710, 262), (270, 262), (270, 220))
    drawing.arrow((200, 190), (75, 190), (75, 130))
    drawing.note(
        300, 281, "frames over a socket pair: JSON headers and raw bodies, nothing pickled"
    )
    return drawing


def batch() -> Drawing:
    """Return the layout of a packed batch."""
    drawing = Drawing("A packed batch compared with a padded one", 860, 300)
    lengths = {"a": 11, "b": 7, "c": 5, "d": 4, "e": 3, "f": 2}
    unit, left = 26, 60
    drawing.note(left, 26, "Padded: a row for each text, 34 of 66 places empty", "bold left")
    for row, (name, length) in enumerate(lengths.items()):
        y = 36 + 17 * row
        drawing.box(left, y, unit * length, 14, "", "ours")
        if length < 11:
            drawing.box(left + unit * length, y, unit * (11 - length), 14, "", "pad")
        drawing.note(left - 20, y + 12, name)
    drawing.note(
        left, 172, "Packed: texts share rows of one length, 1 of 33 places empty", "bold left"
    )
    for row, names in enumerate(("a", "bd", "cef")):
        x, y = left, 184 + 30 * row
        for name in names:
            drawing.box(x, y, unit * lengths[name], 24, name, "ours")
            x += unit * lengths[name]
        if x < left + unit * 11:
            drawing.box(x, y, left + unit * 11 - x, 24, "", "pad")
    drawing.note(380, 200, "A mask keeps the texts of a row apart: each attends to itself only.")
    drawing.note(380, 224, "A step has exactly batch_size texts; steps have nearly equal tokens.")
    drawing.note(380, 248, "One shape for all steps, so kernels and graphs are reused.")
    return drawing


def generation() -> Drawing:
    """Return what a chat template marks as learned."""
    drawing = Drawing("What a template marks with generation is learned", 860, 190)
    drawing.note(
        20, 28, "The template writes each turn; generation marks the assistant's:", "bold left"
    )
    drawing.note(20, 50, "{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
                 "{{ m.content }}{{ eos_token }}{% endgeneration %}")  # fmt: skip
    drawing.note(20, 68, "{% else %}{{ m.content }}{{ eos_token }}{% endif %}")
    x = 20
    for question, width, answer in (("What is 2 plus 1?", 210, "3"), ("And 5?", 150, "6")):
        drawing.box(x, 90, width, 34, f"user: {question}</s>")
        drawing.box(x + width + 4, 90, 90, 34, "assistant: ")
        drawing.box(x + width + 98, 90, 70, 34, f"{answer}</s>", "out")
        drawing.note(x + width + 98, 144, "learned")
        x += width + 172
    drawing.note(20, 174, "The end token inside the mark is learned, too: generation stops there.")
    return drawing


DRAWINGS = {drawing.__name__: drawing for drawing in (layers, job, request, batch, generation)}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().text(), encoding="utf-8")
