"""A job on a terminal: a person sees one bar in place of progress lines, and warnings in colour."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

from tests.support.job_tree import Tree

SCRIPT = """
import os
print("leak  WARNING: 2 rows")
for step in range(1, 4):
    print(f"tokenizing: {step} of 3 rows ({step * 33} %)", flush=True)
print("step 2 of 8 (25 %), 3.1 texts/s, about 4 s left", os.environ.get("AMPHORA_TERMINAL"))
print("step 4 of 8 (50 %), 3.1 texts/s, about 2 s left")
print("ValueError: it ends", end="", flush=True)
"""


def test_progress_is_a_bar_and_warnings_have_a_colour(scripted: Tree) -> None:
    scripted.script(SCRIPT)
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environ = scripted.environment(TERM="xterm")
    process = subprocess.Popen(
        scripted.command(), env=environ, stdout=terminal, stderr=terminal, stdin=terminal
    )
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:  # the end of a terminal
        pass
    os.close(main)
    assert process.wait() == 0
    text = shown.decode()
    assert "\033[33mleak  WARNING: 2 rows\033[0m\r\n" in text
    assert re.search(r"\rtokenizing 100 % \|█+\| 3/3 rows", text), text
    assert re.search(r"\rstep  50 % \|[^|]+\| 4/8, 3.1 texts/s, about 2 s left", text), text
    assert "tokenizing: 1 of 3" not in text and "step 4 of 8" not in text
    assert "about 4 s left 1" in text and "ValueError: it ends" in text
    # CloudWatch gets lines.
    done = scripted.train()
    assert "tokenizing: 1 of 3 rows (33 %)\n" in done.stdout and "\033[" not in done.stdout
    assert "about 4 s left None" in done.stdout
